"""A policy decides alike in any world, at any arrangement, cached or not, and after it was stopped at any step."""

import json
import os
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.jobs import TINY, Job
from support.policy_runs import plain, run_policy
from support.pool import Pool

from pipetransformer.checkpoint.folder import FOLDER
from pipetransformer.config.compose import CONF
from pipetransformer.report.event_log import EVENT_LOG

RUN = (
    *TINY, "model.options={patch_size: 4, embed_dim: 16, depth: 5, num_heads: 2, proj_drop_rate: 0.1}", "epochs=5",
    "precision=float64", "optim.lr=0.01", "optim.clip_norm=0.5", "optim.eps=1e-6", "freeze.interval=0.1",
    "evaluate.every_epochs=5",
)  # fmt: skip
NUM_STEPS = 20
OPTIONS: dict[str, tuple[str, ...]] = {  # with which each freezes something in so short a run
    "schedule": ("freeze.num_frozen=[1,3,3,4]",),
    "prefix": ("freeze.num_blocks=2",),
    "linear": ("freeze.start=0",),
    "freezeout": ("freeze.t0=0.4",),
    "autofreeze": ("freeze.percentile=80",),
    "threshold": ("freeze.tau=0.2", "freeze.warmup=0"),
    "cka": ("freeze.tau=0.3",),
    "egeria": ("freeze.window=2", "freeze.patience=1", "freeze.tolerance=2", "freeze.rate_drop=0.5"),
}
MORE = {  # what the rows of the policies leave out
    "threshold by gradients": ("freeze=threshold", "freeze.signal=gradient_norm", "freeze.tau=0.5", "freeze.warmup=0"),
    "threshold by steps": ("freeze=threshold", "freeze.signal=gradient_change", "freeze.tau=0.9", "freeze.warmup=0"),
    "threshold by updates": ("freeze=threshold", "freeze.signal=relative_update", "freeze.tau=0.05"),
    "threshold with Lamb": ("freeze=threshold", *OPTIONS["threshold"], "optim=lamb", "optim.lr=0.01"),
    "egeria anew": ("freeze=egeria", *OPTIONS["egeria"], "freeze.on_unfreeze=reset"),
    "a target": ("freeze.target_fraction=0.4",),
}
NEVER = {"none", "prefix"}  # decide nothing; make resume-matrix stops them too
POLICIES = {file.stem: (f"freeze={file.stem}", *OPTIONS.get(file.stem, ())) for file in CONF.glob("freeze/*.yaml")}
RUNS = POLICIES | MORE
WORLDS = {
    "two, cached": (2, ()),
    "four in a pipeline": (4, ("parallel=pipeline", "cache=off")),
    "two, sharded": (2, ("parallel=sharded",)),
}
LAMB = "two, sharded"  # where it sums norms over parts
IS_WHOLE = "RESUME_MATRIX" in os.environ  # as by make resume-matrix
UNSTOPPED = {"budget", "cka", "linear"}  # in the suite, one in each world


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], Job]]:
    """Each policy's run in one process without a cache, made when it is first asked for."""

    class Runs(dict[str, tuple[list[float], Job]]):
        def __missing__(self, name: str) -> tuple[list[float], Job]:
            folder = tmp_path_factory.mktemp("alone")
            options = (*RUN, *RUNS[name], "parallel=single", "cache=off")
            every = 1 if IS_WHOLE else next((step for own, _, step in rows() if own == name), 0)
            self[name] = pool.run(1, run_policy, options, folder, every or None)[0], Job(folder, "")
            return self[name]

    return Runs()


def rows() -> Iterator[tuple[str, str, int]]:
    """Each run in one of the worlds, in turns, and the step that it is stopped at; all by make resume-matrix."""
    if IS_WHOLE:
        yield from product(sorted(RUNS), WORLDS, range(NUM_STEPS))
        return
    for index, name in enumerate(sorted({*RUNS} - NEVER)):
        world = LAMB if "Lamb" in name else [*WORLDS][index % len(WORLDS)]
        yield name, world, 0 if name in UNSTOPPED else 3 + index % 14


@pytest.mark.thinned("a target", "egeria-", "pipetransformer", "with Lamb")
@pytest.mark.parametrize(("name", "world", "step"), list(rows()))
def test_a_policy_decides_alike_in_any_world_and_after_a_stop(
    name: str, world: str, step: int, pool: Pool, tmp_path: Path, alone: dict[str, tuple[list[float], Job]]
) -> None:
    """The steps before the stop are those of one process without a cache; with ``step=0`` the run is not stopped."""
    num_ranks, arrangement = WORLDS[world]
    losses, whole = alone[name]
    if step:
        shutil.copy(whole.folder / EVENT_LOG, tmp_path)
        saved = Path(FOLDER, f"step-{step:08d}")
        shutil.copytree(whole.folder / saved, tmp_path / saved)
    rest = pool.run(num_ranks, run_policy, (*RUN, *RUNS[name], *arrangement), tmp_path)[0]
    assert len(rest) == NUM_STEPS - step
    check(losses[:step] + rest, Job(tmp_path, ""), alone[name])
    frozen = {each["num_frozen"] for each in Job(tmp_path, "").events("step")}
    assert (frozen > {0}) or name in NEVER, "the row shows something"


def check(losses: list[float], job: Job, expected: tuple[list[float], Job]) -> None:
    assert losses == pytest.approx(expected[0], rel=0, abs=1e-10)
    found, wanted = job.events("decision"), expected[1].events("decision")
    assert list(map(plain, found)) == list(map(plain, wanted))
    for own, other in zip(found, wanted, strict=True):
        assert own["gradient_norms"] == pytest.approx(other["gradient_norms"], rel=0, abs=1e-9)
        assert own["signals"].keys() == other["signals"].keys()
        for name, values in own["signals"].items():
            assert numbers(values) == pytest.approx(numbers(other["signals"][name]), rel=0, abs=1e-9), name


def numbers(values: list[Any]) -> list[float]:
    """Numbers of a log, in which those that are not finite are null."""
    return [float("inf") if value is None else value for value in values]


def test_a_unfreezing_policy_unfreezes_here(alone: dict[str, tuple[list[float], Job]]) -> None:
    changes = [(each["num_frozen_before"], each["num_frozen"]) for each in alone["egeria"][1].events("decision")]
    assert any(before > after for before, after in changes), json.dumps(changes)


def test_a_run_ends_at_its_target(alone: dict[str, tuple[list[float], Job]]) -> None:
    assert alone["a target"][1].summary["mean_frozen_fraction"] == pytest.approx(0.4, abs=1 / (5 * NUM_STEPS))


def test_a_run_ends_at_its_target_in_seconds(pool: Pool, tmp_path: Path) -> None:
    """Seconds depend on the arrangement, and so do these decisions."""
    pool.run(2, run_policy, (*RUN, "freeze=alpha", "freeze.target_seconds=600"), tmp_path)
    job = Job(tmp_path, "")
    spent = job.summary["predicted_step_seconds"] + sum(each["predicted_cost_s"] for each in job.events("transition"))
    slowest = max(plan["predicted_step_s"] for plan in job.summary["plans"])
    assert spent == pytest.approx(600, abs=slowest)

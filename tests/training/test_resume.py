"""A run that stops and goes on in another world ends as if it had never stopped."""

import shutil
from pathlib import Path

import pytest
from support.jobs import TINY
from support.pool import Pool
from support.resumes import Ran, run_on

from pipetransformer.checkpoint.folder import FOLDER

RUN = (
    *TINY, "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2, proj_drop_rate: 0.1}",
    "epochs=5", "precision=float64", "optim.lr=0.01", "optim.clip_norm=0.5", "freeze.interval=0.2",
)  # fmt: skip
PREFIXES = [1, 2, 3, 1]  # at steps 4, 8, 12 and 16 of 20: three times more, then fewer
STEPS = 20
WORLDS = {
    "elastic": (2, ()),
    "elastic of four": (4, ()),
    "data": (3, ("parallel=data",)),
    "pipeline": (2, ("parallel=pipeline",)),
    "sharded": (2, ("parallel=sharded",)),
    "one process": (1, ()),
}


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """The uninterrupted run, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, pool.run(2, run_on, RUN, folder, PREFIXES)[0]


def stopped_at(whole: Path, step: int, folder: Path) -> Path:
    """A run folder as the run would have left it after a step."""
    name = f"step-{step:08d}"
    shutil.copytree(whole / FOLDER / name, folder / FOLDER / name)
    return folder


@pytest.mark.parametrize(
    ("step", "world"),
    [
        (1, "one process"), (2, "sharded"), (3, "data"), (4, "pipeline"), (5, "elastic of four"), (7, "one process"),
        (8, "sharded"), (9, "data"), (10, "elastic"), (11, "pipeline"), (12, "elastic of four"), (13, "sharded"),
        (14, "data"), (15, "one process"), (16, "elastic"), (17, "pipeline"), (18, "elastic of four"), (19, "elastic"),
    ],
)  # fmt: skip
def test_a_run_goes_on_in_any_world_as_if_it_had_never_stopped(
    pool: Pool, tmp_path: Path, whole: tuple[Path, Ran], step: int, world: str
) -> None:
    num_ranks, options = WORLDS[world]
    folder = stopped_at(whole[0], step, tmp_path)
    ranks = pool.run(num_ranks, run_on, (*RUN, *options), folder, PREFIXES, None, None)
    assert [rank.differences for rank in ranks] == num_ranks * [[]]
    assert ranks[0].first == step
    assert ranks[0].losses == pytest.approx(whole[1].losses[step:], rel=0, abs=1e-10)
    check_end(ranks[0], whole[1])


def check_end(found: Ran, expected: Ran) -> None:
    approx = ("norm_sums", "policy_state", "metrics", "best_metrics")
    assert {k: v for k, v in found.end.items() if k not in approx} == {
        k: v for k, v in expected.end.items() if k not in approx
    }
    assert found.end["policy_state"] == pytest.approx(expected.end["policy_state"], rel=1e-9)
    assert found.end["metrics"] == expected.end["metrics"]


def test_a_resumed_run_is_resumed_again(pool: Pool, tmp_path: Path, whole: tuple[Path, Ran]) -> None:
    folder = stopped_at(whole[0], 3, tmp_path)
    losses = whole[1].losses[:3]
    for world in ("sharded", "pipeline", "data", "elastic of four"):
        num_ranks, options = WORLDS[world]
        ranks = pool.run(num_ranks, run_on, (*RUN, *options), folder, PREFIXES, 4)
        assert [rank.differences for rank in ranks] == num_ranks * [[]]
        losses += ranks[0].losses
    assert losses == pytest.approx(whole[1].losses[:19], rel=0, abs=1e-10)

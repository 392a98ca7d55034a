"""A run that freezes, unfreezes and freezes again is one training at any world, stopped at any step or never."""

from pathlib import Path

import pytest
from support.jobs import TINY
from support.pool import Pool
from support.resumes import Ran, run_on, run_on_forgetting, run_on_from

RUN = (
    *TINY, "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2, proj_drop_rate: 0.1}", "epochs=4",
    "dataset.max_train_samples=48", "precision=float64", "optim.lr=0.01", "freeze.interval=0.2",
)  # fmt: skip
PREFIXES = [3, 1, 2, 0]  # before steps 2, 4, 6 and 8 of 12: freezes, unfreezes, freezes again, unfreezes all
WORLDS = {
    "elastic of four": (4, ("parallel.device_memory_gib=0.00017",)),
    "pipeline": (2, ("parallel=pipeline",)),
    "sharded": (2, ("parallel=sharded",)),
    "one process": (1, ()),
}
Whole = dict[str, tuple[Path, Ran]]


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """For either way to train again the run that never stops, on one process without a cache."""
    found: Whole = {}
    for way in ("keep", "reset"):
        folder = tmp_path_factory.mktemp(way)
        found[way] = folder, pool.run(1, run_on, (*RUN, "cache=off"), folder, PREFIXES, None, 1, way)[0]
    return found


def test_blocks_freeze_and_train_again_either_way(whole: Whole) -> None:
    kept, reset = (whole[way][1] for way in ("keep", "reset"))
    assert [plan[0] for plan in kept.plans] == [plan[0] for plan in reset.plans] == [0, *PREFIXES]
    assert kept.losses[:5] == reset.losses[:5], "the first step after unfreezing has the same weights"
    assert abs(kept.losses[5] - reset.losses[5]) > 1e-6


@pytest.mark.thinned("pipeline")
@pytest.mark.parametrize(("world", "on_unfreeze"), [("elastic of four", "keep"), ("pipeline", "reset")])
def test_it_is_one_training_at_any_world(
    world: str, on_unfreeze: str, pool: Pool, tmp_path: Path, whole: Whole
) -> None:
    num_ranks, options = WORLDS[world]
    ran = pool.run(num_ranks, run_on, (*RUN, *options), tmp_path, PREFIXES, None, None, on_unfreeze)[0]
    assert ran.losses == pytest.approx(whole[on_unfreeze][1].losses, rel=0, abs=1e-10)
    if world == "elastic of four":
        assert [plan[:2] for plan in ran.plans] == [(0, 0), (3, 3), (1, 1), (2, 2), (0, 0)], "the cache falls back"
        assert len({plan[2:] for plan in ran.plans}) > 1, "the arrangement follows"


@pytest.mark.thinned("one process-keep")
@pytest.mark.parametrize(
    ("world", "on_unfreeze", "steps"),
    [
        ("one process", "keep", range(1, 12)),
        ("one process", "reset", [3, 5, 7]),
        ("sharded", "keep", [3, 7]),
        ("pipeline", "keep", [5]),
        ("elastic of four", "keep", [3]),
    ],
)
def test_it_goes_on_from_any_step_at_any_world(
    world: str, on_unfreeze: str, steps: list[int], pool: Pool, tmp_path: Path, whole: Whole
) -> None:
    """What is parked is restored bit for bit, and used when its blocks train again."""
    (folder, expected), (num_ranks, options) = whole[on_unfreeze], WORLDS[world]
    ranks = pool.run(num_ranks, run_on_from, (*RUN, *options), folder, tmp_path, list(steps), PREFIXES, on_unfreeze)
    for step, *ran in zip(steps, *ranks, strict=True):
        assert [rank.differences for rank in ran] == num_ranks * [[]]
        assert ran[0].losses == pytest.approx(expected.losses[step:], rel=0, abs=1e-10)


def test_a_run_that_forgets_what_is_parked_goes_on_otherwise(pool: Pool, tmp_path: Path, whole: Whole) -> None:
    folder, expected = whole["keep"]
    (ran,) = pool.run(1, run_on_forgetting, RUN, folder, tmp_path, [3], PREFIXES, "keep")[0]
    assert any("exp_avg" in name for name in ran.differences)
    assert ran.losses != pytest.approx(expected.losses[3:], rel=0, abs=1e-10)

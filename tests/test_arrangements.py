"""The arms of a comparison differ by one word, and all train alike."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.cases import tensors_equal
from support.jobs import TINY, Job, loaded, run_job
from support.pool import Pool

from pipetransformer.config.no_effect import warnings
from pipetransformer.errors import UserError

RUN = (*TINY, "freeze=schedule", "freeze.num_frozen=[1]", "precision=float64")


@pytest.fixture(scope="module")
def single(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(pool, 1, tmp_path_factory.mktemp("jobs") / "single", *RUN, "parallel=single", made_up_times=True)


def test_single_is_one_device(single: Job) -> None:
    assert [(plan["stages"], plan["cache_level"]) for plan in single.summary["plans"]] == [([[0, 3]], 0), ([[2, 3]], 1)]


@pytest.mark.parametrize(
    ("arrangement", "shapes", "levels"),
    [
        ("data", [(1, 2), (1, 2)], [0, 1]),
        ("sharded", [(1, 2), (1, 2)], [0, 1]),
        ("pipeline", [(2, 1), (2, 1)], [0, 0]),
    ],
)
def test_a_static_arrangement_stays_and_trains_as_a_single_device_does(
    arrangement: str, shapes: list[tuple[int, int]], levels: list[int], pool: Pool, tmp_path: Path, single: Job
) -> None:
    job = run_job(pool, 2, tmp_path / "run", *RUN, f"parallel={arrangement}", made_up_times=True)
    plans = job.summary["plans"]
    assert [(len(plan["stages"]), plan["num_replicas"]) for plan in plans] == shapes
    assert [plan["cache_level"] for plan in plans] == levels
    assert {plan["sharded"] for plan in plans} == {arrangement == "sharded"}
    assert job.losses == pytest.approx(single.losses, rel=0, abs=1e-10)
    assert job.summary["metrics"] == single.summary["metrics"]
    saved, expected = (load_file(run.folder / "model" / "model.safetensors") for run in (job, single))
    tensors_equal(saved, expected)


def test_shards_take_the_mean_of_the_gradients_in_float32_too(pool: Pool, tmp_path: Path) -> None:
    """There FSDP would ask for the mean, which gloo takes for a sum in some versions of torch."""
    run = (*TINY, "epochs=1", "freeze=none")
    data, sharded = (run_job(pool, 2, tmp_path / name, *run, f"parallel={name}") for name in ("data", "sharded"))
    norms = [[step["grad_norm"] for step in job.events("step")] for job in (data, sharded)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_a_pipeline_says_why_it_has_no_cache() -> None:
    assert "the stages keep all their layers" in warnings(loaded("parallel=pipeline"))[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel=data", "parallel.num_stages=2"], r"parallel=data fixes .* parallel\.num_stages=2; drop it"),
        (["parallel=single", "parallel.world_size=2"], "parallel=single is one process"),
        (
            ["parallel=sharded", "parallel.num_replicas=2"],
            r"parallel=sharded fixes .* parallel\.num_replicas=2; drop it",
        ),
        (
            ["parallel=sharded", "parallel.schedule=gpipe"],
            r"parallel=sharded runs all .* parallel\.schedule=gpipe could",
        ),
        (
            ["parallel=sharded", "parallel.stages_per_rank=2"],
            r"parallel=sharded runs all .* parallel\.stages_per_rank=2 could",
        ),
        (["parallel.arrangement=date"], r"parallel\.arrangement=date is unknown; choose one of elastic, data"),
    ],
)
def test_what_contradicts_an_arrangement_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        loaded(*overrides)

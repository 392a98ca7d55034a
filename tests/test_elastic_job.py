"""The promise of the whole: a run that packs, replicates and caches as it freezes computes what one process does."""

from pathlib import Path

import pytest
from support.jobs import Job, run_job
from support.pool import Pool

RUN = (
    "logger=none",
    "dataset.max_train_samples=64",
    "dataset.max_eval_samples=40",
    "model.options={patch_size: 4, embed_dim: 64, depth: 7, num_heads: 2}",
    "freeze=schedule",
    "freeze.num_frozen=[4, 6, 6]",
    "precision=float64",
    "epochs=4",  # two of them left at the last transition, so that filling the cache pays
    "batch_size=16",
)
BUDGET = "parallel.device_memory_gib=0.00435"  # two active blocks of 1.57 MB fit, three do not


@pytest.fixture(scope="module")
def on_one_device(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(pool, 1, tmp_path_factory.mktemp("jobs") / "reference", *RUN, "cache=off", made_up_times=True)


def test_four_stages_become_two_and_one_with_the_losses_of_one_device(
    pool: Pool, tmp_path: Path, on_one_device: Job
) -> None:
    job = run_job(pool, 4, tmp_path / "run", *RUN, BUDGET, made_up_times=True)
    plans = job.summary["plans"]
    assert [(len(plan["stages"]), plan["num_replicas"]) for plan in plans] == [(4, 1), (2, 2), (1, 4)]
    assert [plan["cache_level"] for plan in plans] == [0, 4, 6]
    assert len(job.losses) == 16
    assert job.losses == pytest.approx(on_one_device.losses, rel=0, abs=1e-10)
    assert job.summary["metric"]["value"] == on_one_device.summary["metric"]["value"]

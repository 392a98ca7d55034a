from pathlib import Path

import pytest
from support.jobs import TINY, Job, run_job
from support.pool import Pool

UNTRAINED = (*TINY, "optim.lr=1e-12", "epochs=1", "precision=float64", "dataset.max_eval_samples=13", "batch_size=8")


def evaluated(pool: Pool, folder: Path, world_size: int, *overrides: str) -> Job:
    job = run_job(pool, world_size, folder, *UNTRAINED, *overrides, made_up_times=True)
    assert not job.error
    return job


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return evaluated(pool, tmp_path_factory.mktemp("evaluate") / "run", 1)


@pytest.mark.thinned("2-1", "1-3")
@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 2), (2, 1), (2, 2), (1, 4), (1, 3)])
def test_every_arrangement_scores_each_of_an_odd_number_of_samples_once(
    pool: Pool, tmp_path: Path, alone: Job, num_stages: int, num_replicas: int
) -> None:
    arrangement = [f"parallel.num_stages={num_stages}", f"parallel.num_replicas={num_replicas}"]
    job = evaluated(pool, tmp_path / "run", num_stages * num_replicas, *arrangement)
    assert job.summary["metric"] == alone.summary["metric"]
    assert job.summary["metric"]["num_samples"] == 13
    assert job.summary["metric"]["value"] * 13 == pytest.approx(round(job.summary["metric"]["value"] * 13))


def test_the_end_of_the_run_is_evaluated_whatever_the_interval(pool: Pool, tmp_path: Path) -> None:
    job = evaluated(pool, tmp_path / "run", 1, "epochs=5", "evaluate.every_epochs=2")
    steps_per_epoch = job.events("start")[0]["steps_per_epoch"]
    assert [event["step"] / steps_per_epoch for event in job.events("evaluate")] == [2, 4, 5]

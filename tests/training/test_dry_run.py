"""A dry run estimates time and memory, and leaves nothing but its record."""

from pathlib import Path

import pytest
from support.jobs import TINY, loaded, play, run_job
from support.pool import Pool

from pipetransformer.checkpoint.folder import FOLDER
from pipetransformer.errors import UserError
from pipetransformer.launch.run_dir import refuse_other_run

DRY = (*TINY[1:], "logger=tensorboard", "freeze=schedule", "freeze.num_frozen=[1,2]", "freeze.interval=0.25",
       "cache=off")  # fmt: skip


def test_it_stops_before_the_first_step_with_the_estimate(pool: Pool, tmp_path: Path) -> None:
    job = run_job(pool, 2, tmp_path / "run", *DRY, "dry_run=true", "parallel.device_memory_gib=1", made_up_times=True)
    assert (job.error, job.summary["status"], job.summary["optimizer_steps"]) == ("", "dry_run", 0)
    assert not job.losses
    names = {path.name for path in job.folder.iterdir()}
    assert not names & {"model", FOLDER, "tensorboard"}
    (start,) = job.events("start")
    estimate = job.summary["estimate"]
    assert start["estimate"] == estimate
    assert estimate["train_seconds"] == pytest.approx(8 * estimate["step_seconds"])
    assert estimate["num_frozen"] == 2
    assert estimate["train_seconds_frozen"] < estimate["train_seconds"]
    assert 0 < max(estimate["device_bytes"]) <= estimate["device_budget"] == 2**30
    refuse_other_run(loaded(*DRY), job.folder)
    assert not (job.folder / "summary.json").exists(), "the run itself takes its place"


def test_a_run_tells_the_same_estimate_and_then_trains(pool: Pool, tmp_path: Path) -> None:
    job = run_job(pool, 1, tmp_path / "run", *TINY, made_up_times=True)
    assert len(job.losses) == 8
    estimate = job.events("start")[0]["estimate"]
    assert job.summary["estimate"] == estimate
    assert job.summary["step_seconds"] < job.summary["predicted_step_seconds"], "a second per sample was made up"
    assert pool.run(1, play, (*TINY, "resume=auto", "epochs=3", "resume.allow=[epochs]"), job.folder, True) == [""]
    assert "estimate" not in job.summary, "it was of another run"


@pytest.mark.parametrize("other", ["resume=auto", "overwrite=true"])
def test_it_does_not_touch_another_run(other: str) -> None:
    with pytest.raises(UserError, match=f"dry_run=true estimates a run that starts, and {other} is about another"):
        loaded(*TINY, "dry_run=true", other)

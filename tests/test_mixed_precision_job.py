"""Whole runs whose matrix products are in 16 bits."""

from itertools import pairwise
from pathlib import Path

import pytest
from support.jobs import TINY, run_job
from support.pool import Pool

RUN = (*TINY, "freeze=schedule", "freeze.num_frozen=[1]")
FLOAT16 = ("parallel.num_stages=1", "precision=float16")


def test_a_run_in_bfloat16_freezes_and_caches_close_to_float32(pool: Pool, tmp_path: Path) -> None:
    pipeline = ("parallel.num_stages=2", "precision=bfloat16")
    mixed = run_job(pool, 2, tmp_path / "mixed", *RUN, *pipeline, made_up_times=True)
    single = run_job(pool, 1, tmp_path / "single", *RUN, made_up_times=True)
    assert [plan["cache_level"] for plan in mixed.summary["plans"]] == [0, 1]
    assert mixed.losses == pytest.approx(single.losses, rel=2**-7)
    assert mixed.losses != pytest.approx(single.losses, rel=1e-5), "the products must have been rounded"
    assert "loss_scale" not in mixed.summary


def test_a_run_in_float16_goes_on_after_overflows_and_decides_by_good_steps_only(pool: Pool, tmp_path: Path) -> None:
    """All of the first epoch overflows, so that there is nothing to decide by at its end."""
    job = run_job(pool, 2, tmp_path / "run", *RUN, *FLOAT16, first_loss_scale=2.0**22, made_up_times=True)
    steps = job.events("step")
    counts = [step["num_skipped_steps"] for step in steps]
    assert counts[:4] == [1, 2, 3, 4], "an epoch is four steps"
    assert [step["loss_scale"] for step in steps] == [2.0 ** (22 - count) for count in counts]
    assert (job.summary["loss_scale"], job.summary["num_skipped_steps"]) == (steps[-1]["loss_scale"], counts[-1])
    assert all(0 < step["loss"] < 10 for step in steps)
    (decision,) = job.events("decision")
    first_good = next(step for step, (before, count) in enumerate(pairwise(counts), start=2) if count == before)
    assert decision["step"] == first_good
    assert all(0 < norm < 10 for norm in decision["gradient_norms"])

"""The experiment trains with every policy there is, and shows what each froze and what measuring took."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.jobs import TINY, run_job
from support.pool import Pool

from experiments.policies import __main__ as experiment
from pipetransformer.config.compose import CONF
from pipetransformer.report.run_folder import write_json


def test_every_policy_has_an_arm() -> None:
    assert set(experiment.ARMS) == {file.stem for file in CONF.glob("freeze/*.yaml")}


def test_a_row_shows_what_froze_when_and_what_measuring_took(pool: Pool, tmp_path: Path) -> None:
    options = ("freeze=threshold", "freeze.tau=1", "freeze.warmup=0", "freeze.interval=0.25", "checkpoint=off")
    job = run_job(pool, 1, tmp_path / "threshold", *TINY, *options)
    assert not job.error
    found = experiment.figures("threshold", job.folder)
    assert found["prefixes"] == [[0, 0], [4, 2]]  # the first decision has no weights to compare with
    assert found["mean_frozen_fraction"] == 0.5
    assert set(found["signal_seconds"]) == {"weight_change"}
    assert 0 < found["signal_share"] < 1
    row = experiment.table([found]).splitlines()[-1]
    assert "| `threshold` | 2 from 4 | 50% |" in row
    assert found["cpu_seconds"] > 0


def test_a_run_that_is_complete_is_not_repeated(tmp_path: Path) -> None:
    calls: list[Any] = []

    def run(command: list[str], **_: Any) -> None:
        calls.append(command)
        write_json(tmp_path / "alpha" / "summary.json", {"status": "completed"})

    (tmp_path / "alpha").mkdir()
    with mock.patch.object(subprocess, "run", run):
        experiment.train("alpha", tmp_path, ["epochs=3"])
        experiment.train("alpha", tmp_path, ["epochs=3"])
    assert len(calls) == 1
    assert calls[0][:2] == [sys.executable, "train.py"]
    assert {"freeze=alpha", "epochs=3", f"hydra.run.dir={tmp_path / 'alpha'}"} < set(calls[0])


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_run_that_did_not_end_is_no_result(status: str, tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"status": status})
    assert not experiment.is_complete(tmp_path)

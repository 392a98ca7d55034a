"""``python train.py -m``: every job in fresh processes with a folder of its own, whatever happens to the others."""

import json
from pathlib import Path

import pytest
import yaml
from support.command import Ended, train
from support.jobs import TINY

from pipetransformer.report import page
from pipetransformer.report.__main__ import main

JOBS = "0", "1", "2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def ended(folder: Path) -> Ended:
    """Two jobs that cannot run, one found out before the workers start and one by a worker, and one that can."""
    sweep = ["parallel.device_memory_gib=0,0.000001,1", "freeze=none", "hydra.sweep.dir=sweep"]
    return train(folder, "-m", *TINY, "parallel.world_size=1", *sweep)


def test_each_job_has_its_folder_with_its_own_settings(folder: Path, ended: Ended) -> None:
    assert {path.name for path in (folder / "sweep").iterdir() if path.is_dir()} == {*JOBS}
    settings = [yaml.safe_load((folder / "sweep" / job / "config.yaml").read_text()) for job in JOBS]
    assert [setting["parallel"]["device_memory_gib"] for setting in settings] == [0, 1e-6, 1.0]


def test_a_job_that_fails_does_not_stop_the_others(folder: Path, ended: Ended) -> None:
    summaries = [json.loads((folder / "sweep" / job / "summary.json").read_text()) for job in JOBS]
    assert [summary["status"] for summary in summaries] == ["failed", "failed", "completed"]
    assert summaries[0]["error"].startswith("parallel.device_memory_gib=0")
    assert "no plan fits parallel.device_memory_gib=9.99" in summaries[1]["error"]


def test_the_sweep_ends_with_a_table_of_its_jobs(ended: Ended) -> None:
    lines = ended.out.splitlines()
    begin = next(row for row, line in enumerate(lines) if line.startswith("jobs of the sweep"))
    header, refused, failed, completed, why_refused, why_failed, folders, command = lines[begin + 1 :]
    assert header.split()[:4] == ["arm", "runs", "result", "best"]
    assert refused.split() == ["parallel.device_memory_gib=0", "1", "(0)", *["-"] * 8, "failed"]
    assert failed.split() == ["parallel.device_memory_gib=1e-06", "1", "(1)", *["-"] * 8, "failed"]
    assert completed.split()[:4] == ["parallel.device_memory_gib=1", "1", "(2)", "accuracy"]
    assert completed.split()[-1] == "completed"
    assert why_refused.startswith("failed: sweep/0: parallel.device_memory_gib=0.0 must be above 0")
    assert why_failed.startswith("failed: sweep/1: no plan fits parallel.device_memory_gib=9.99")
    assert folders.endswith("sweep/<job>")
    assert command.endswith("pipetransformer-report runs=sweep")


def test_the_command_that_it_names_prints_the_same_table(
    folder: Path, ended: Ended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ended.out.splitlines()
    begin = next(row for row, line in enumerate(lines) if line.startswith("jobs of the sweep"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(page, "FIGURES", ())
    monkeypatch.setattr(page, "COMPARISONS", ())
    main([lines[-1].rpartition(" ")[2]])
    *table, csv, html = capsys.readouterr().out.splitlines()
    assert table == lines[begin + 1 : -2]
    assert (csv, html) == ("sweep/comparison.csv", "sweep/comparison.html")


def test_the_sweep_fails_and_names_the_jobs_with_the_reasons(ended: Ended) -> None:
    assert ended.code == 1
    failed = [line for line in ended.err.splitlines() if line.startswith("job ")]
    assert len(failed) == 2
    assert failed[0].startswith("job 0 (")
    assert "parallel.device_memory_gib=0" in failed[0]
    assert "must be above 0" in failed[0]
    assert "no plan fits parallel.device_memory_gib=9.99" in failed[1]
    assert "Traceback" not in ended.err

"""Ranks are forked where that is safe, with their share of the cores."""

import fcntl
import os
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from support.jobs import ROOT, loaded

from pipetransformer.launch import forkserver
from pipetransformer.launch.run_dir import finished_summary
from pipetransformer.report.event_log import SUMMARY


@pytest.mark.parametrize(
    ("device", "has_gpu", "expected"),
    [
        ("cpu", False, "forkserver"),
        ("cpu", True, "forkserver"),
        ("auto", False, "forkserver"),
        ("auto", True, "spawn"),
        ("cuda", False, "spawn"),
    ],
)
def test_ranks_are_spawned_where_they_may_use_a_gpu(
    device: str, has_gpu: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "GPU_FILES", (str(tmp_path if has_gpu else tmp_path / "none"),))
    assert forkserver.start_method(device) == expected


def test_what_model_and_dataset_name_is_imported_before_ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(ForkServerContext, "set_forkserver_preload", lambda _, names: given.extend(names))
    monkeypatch.setattr(forkserver.forkserver, "ensure_running", lambda: None)
    forkserver.preload("cpu", 2, ["timm", "sklearn.datasets"])
    assert {"timm", "sklearn.datasets", "pipetransformer.training.run"} <= set(given)


def test_the_server_imports_the_package_of_its_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[str | None] = []
    monkeypatch.setattr(ForkServerContext, "set_forkserver_preload", lambda *_: None)
    monkeypatch.setattr(forkserver.forkserver, "ensure_running", lambda: given.append(os.environ.get("PYTHONPATH")))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for folder in (ROOT, tmp_path):
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        forkserver.preload("cpu", 2, [])
    assert given == [str(ROOT), None]
    assert "PYTHONPATH" not in os.environ


def test_the_cores_are_shared_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.setattr(forkserver.forkserver, "ensure_running", lambda: given.append(os.environ["OMP_NUM_THREADS"]))
    for name in (forkserver.THREADS, forkserver.OWN_THREADS):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for num_ranks in (4, 2):  # two jobs of a sweep
        forkserver.preload("cpu", num_ranks, ["timm"])
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    forkserver.preload("cpu", 4, [])
    forkserver.preload("cuda", 4, [])
    assert given == ["2", "4", "7"]


def test_what_a_killed_launcher_has_left_is_removed_also_where_nothing_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver.tempfile, "tempdir", str(tmp_path))
    for name in ("killed", "alive"):
        (tmp_path / f"pymp-{name}").mkdir()
        (tmp_path / f"pipetransformer-{name}").mkdir()
        (tmp_path / f"pipetransformer-{name}" / forkserver.LOCK).write_text(str(tmp_path / f"pymp-{name}"))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / SUMMARY).write_text('{"status": "completed"}')
    with (tmp_path / "pipetransformer-alive" / forkserver.LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert finished_summary(loaded("resume=auto"), run_dir) == {"status": "completed"}
    assert {path.name for path in tmp_path.iterdir()} == {"pymp-alive", "pipetransformer-alive", "run"}


def test_two_runs_that_start_at_once_leave_each_other_their_temporary_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one looks for what a killed run has left just before this one has its lock."""
    lock_it, found, held = fcntl.flock, list[bool](), list[int]()

    def flock(file: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            forkserver.remove_stale()
            (folder,) = tmp_path.glob(f"{forkserver.TEMPORARY}*")
            found.append(any(folder.iterdir()))
            held.append(file)
        lock_it(file, how)

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(forkserver.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(forkserver.util, "get_temp_dir", lambda: str(tmp_path / "pymp-sockets"))
    monkeypatch.setattr(forkserver.atexit, "register", lambda *_, **__: None)
    monkeypatch.setattr(fcntl, "flock", flock)
    forkserver.use_one_temporary_folder.__wrapped__()
    assert found == [True]
    (folder,) = tmp_path.glob(f"{forkserver.TEMPORARY}*")
    assert (folder / forkserver.LOCK).read_text() == str(tmp_path / "pymp-sockets")
    forkserver.remove_stale()
    assert folder.is_dir(), "its run goes on"
    os.close(*held)

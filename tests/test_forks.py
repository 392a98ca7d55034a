"""Ranks are forked where that is safe, and none outlives its launcher."""

import multiprocessing
import os
from pathlib import Path

import pytest

from pipetransformer import forks


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
    monkeypatch.setattr(forks, "GPU_FILES", (str(tmp_path if has_gpu else tmp_path / "none"),))
    assert forks.start_method(device) == expected


def test_the_cores_are_shared_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    monkeypatch.setattr(forks.forkserver, "ensure_running", lambda: given.append(os.environ["OMP_NUM_THREADS"]))
    for world_size in (4, None):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        forks.begin("cpu", world_size, "image")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    forks.begin("cpu", 4, "text")
    forks.begin("cuda", 4, "text")
    assert given == ["2", "4", "7"]


def test_a_rank_is_interrupted_when_its_launcher_ends_and_not_before() -> None:
    context = multiprocessing.get_context("spawn")
    launcher, (here, there) = context.Process(target=_wait_for_ever, daemon=True), context.Pipe()
    launcher.start()
    rank = context.Process(target=_rank, args=(launcher.pid, there), daemon=True)
    rank.start()
    assert here.poll(60)
    assert here.recv() == "watches"
    assert not here.poll(0.2)
    launcher.kill()
    assert here.poll(60)
    assert here.recv() == "interrupted"
    rank.join(60)
    late = context.Process(target=_rank, args=(launcher.pid, there), daemon=True)
    launcher.join(60)
    late.start()
    assert here.poll(60)
    assert here.recv() == "interrupted", "it was too late to watch"
    late.join(60)


def _wait_for_ever() -> None:
    multiprocessing.Event().wait()


def _rank(launcher: int, pipe: multiprocessing.connection.Connection) -> None:
    try:
        forks.end_with(launcher)
        pipe.send("watches")
        multiprocessing.Event().wait()
    except KeyboardInterrupt:
        pipe.send("interrupted")

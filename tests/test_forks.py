"""Ranks are forked where that is safe, with their share of the cores."""

import os
from multiprocessing.context import ForkServerContext
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


def test_what_model_and_dataset_name_is_imported_before_ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(ForkServerContext, "set_forkserver_preload", lambda _, names: given.extend(names))
    monkeypatch.setattr(forks.forkserver, "ensure_running", lambda: None)
    forks.begin("cpu", 2, ["timm", "sklearn.datasets"])
    assert {"timm", "sklearn.datasets", "pipetransformer.training.job"} <= set(given)


def test_the_cores_are_shared_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    monkeypatch.setattr(forks.forkserver, "ensure_running", lambda: given.append(os.environ["OMP_NUM_THREADS"]))
    for world_size in (4, None):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        forks.begin("cpu", world_size, ["timm"])
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    forks.begin("cpu", 4, [])
    forks.begin("cuda", 4, [])
    assert given == ["2", "4", "7"]

"""A run that cannot be is refused before any process starts."""

import gc
import resource
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support.jobs import loaded

from pipetransformer.data.images.datasets import Digits
from pipetransformer.errors import UserError
from pipetransformer.launch import elastic, forkserver, start
from pipetransformer.training import run


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(forkserver, "preload", lambda *_: pytest.fail("a process starts"))


@pytest.mark.parametrize(
    ("cores", "memory_gib", "files", "limit"),
    [(2, 64, 10000, 32), (64, 64, 256, 32), (64, 64, 100000, 125), (64, 2, 100000, 16)],
    ids=["cores", "files", "message", "memory"],
)
def test_no_more_processes_than_the_machine_can_start(
    cores: int, memory_gib: int, files: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory_gib * 2**18}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    start.check_world_size(limit)
    start.check_world_size(None)
    config = loaded("parallel.world_size=999")
    with pytest.raises(
        UserError, match=rf"parallel\.world_size=999 is more than the {limit} processes .*\({cores} cores, .*torchrun"
    ):
        start.preflight(config)


def test_a_process_that_may_open_too_few_files_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    with pytest.raises(UserError, match=r"may have 40 files open, and a run takes 64 at least; .* ulimit -n 1024"):
        start.check_world_size(None)


def test_a_batch_that_is_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    config = replace(loaded(), dataset=Digits(max_train_samples=20))
    with pytest.raises(UserError, match="batch_size=32 is larger than the 20 training samples"):
        start.preflight(config)


def test_a_model_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    config = loaded("model=vit", "model.name=vit_of_nobody")
    with pytest.raises(UserError, match="vit_of_nobody"):
        start.preflight(config)


def test_data_that_are_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na bird sings\t1\n")
    with pytest.raises(UserError, match=r"has no test\.tsv or dev\.tsv"):
        start.preflight(loaded("model=bert", "dataset=sst2", f"dataset.path={tmp_path}"))


@pytest.mark.parametrize(("device", "num_gpus"), [("cuda", 0), ("cuda", 1), ("auto", 1)])
def test_each_process_needs_a_gpu_of_its_own(device: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = loaded(f"parallel.device={device}", "parallel.world_size=2")
    with pytest.raises(UserError, match=rf"parallel\.world_size=2 processes need a GPU each, and there are {num_gpus}"):
        elastic._num_ranks(config)
    assert elastic._num_ranks(loaded("parallel.device=cpu", "parallel.world_size=2")) == 2


def test_a_rank_of_torchrun_imports_without_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start of a process would take a fifth more time; a library that is not there is missed where it is used."""
    imported: dict[str, bool] = {}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(start, "import_module", lambda name: imported.update({name: gc.isenabled()}))
    monkeypatch.setattr(elastic, "run_here", lambda *_: {"collects": gc.isenabled()})
    assert start.start(loaded(), tmp_path, {}) == {"collects": True}
    assert {"pipetransformer.training.run", "timm"} <= imported.keys()
    assert not any(imported.values())
    monkeypatch.setattr(start, "import_module", lambda _: import_module("no_such_library"))
    assert start.start(loaded(), tmp_path, {}) == {"collects": True}


def test_a_forked_rank_collects_although_its_server_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(run, "run_job", lambda *_: {"collects": gc.isenabled()})
    gc.disable()
    try:
        assert elastic._run_rank(loaded(), tmp_path, {}, None, tmp_path) == {"collects": True}
    finally:
        gc.enable()
        gc.unfreeze()

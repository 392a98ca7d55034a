"""Whole runs on the device against the same on the CPU. Not collected with the suite: see ``__main__.py``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import face
import pytest
import torch
import torch.distributed as dist
from support.jobs import TINY, loaded
from support.texts import text_run, write_encoder, write_table

import pipetransformer as pt
from pipetransformer.runtime.elastic import ElasticRuntime

NAME = face.NAME
PICTURES = (
    *TINY[:3], "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2, proj_drop_rate: 0.1}", "epochs=3",
    "batch_size=16",
)  # fmt: skip
FREEZES = ("freeze=schedule", "freeze.num_frozen=[1,2,3]", "freeze.interval=0.25")
CACHED = (*FREEZES, "cache.require=true")
TEXT_FREEZES = ("freeze=schedule", "freeze.num_frozen=[1]", "freeze.interval=0.3")
OFTEN = "freeze.interval=0.1"
RUNS: dict[str, tuple[str, ...]] = {
    "default": (), "schedule": FREEZES, "no cache": (*FREEZES, "cache=off"), "cache": CACHED,
    "cache on disk": (*CACHED, "cache.memory_gib=0"), "cache of 16 bits": (*CACHED, "cache.storage=float16"),
    "cached draws": (*CACHED, "dataset.augment=true", "cache.augmentation=variants", "cache.variants=2"),
    "micro-batches": (*CACHED, "parallel.num_microbatches=4"), "recompute": (*FREEZES, "parallel.recompute=true"),
    "Lamb": (*FREEZES, "optim=lamb"), "SGD": (*FREEZES, "optim=sgd", "optim.lr=0.01"),
    "average": (*FREEZES, "optim.ema_decay=0.9"), "Adan": (*FREEZES, "optim=timm", "optim.name=adan"),
    "Muon": (*FREEZES, "optim=timm", "optim.name=muon"), "NAdam": (*FREEZES, "optim=torch", "optim.name=NAdam"),
    "Lora": (*FREEZES, "peft=lora"), "workers": (*FREEZES, "loader.num_workers=1"), "mixup": ("dataset.mixup=0.2",),
    "replicas": (*FREEZES, "parallel=data"), "shards": (*FREEZES, "parallel=sharded"),
    "baseline": (*FREEZES, "baseline=true"), "trace": (*FREEZES, "trace=true"),
    "guard": (*FREEZES, "freeze.guard=0.01", "evaluate.every_steps=3", "checkpoint.every_steps=2"),
    "best": (*FREEZES, "evaluate.save=best"), "device's draws": (*FREEZES, "randomness=device"),
    "cka": ("freeze=cka", "freeze.tau=0.3", OFTEN), "autofreeze": ("freeze=autofreeze", OFTEN),
    "egeria": ("freeze=egeria", "freeze.window=2", "freeze.patience=1", "freeze.rate_drop=0.5", OFTEN),
    "freezeout": ("freeze=freezeout", "freeze.t0=0.4", OFTEN),
    "threshold": ("freeze=threshold", "freeze.signal=relative_update", "freeze.tau=0.05", OFTEN),
}  # fmt: skip
TEXTS: dict[str, tuple[str, ...]] = {
    "texts": TEXT_FREEZES, "cached texts": (*TEXT_FREEZES, "cache.require=true"),
    "texts by length": (*TEXT_FREEZES, "batching=bucketed"), "texts with Lora": ("freeze=none", "peft=lora"),
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("texts")
    for name, count in (("train.tsv", 40), ("dev.tsv", 13)):
        write_table(folder / name, [row % 2 for row in range(count)])
    run = text_run(write_encoder(folder / "encoder"), "sst2", folder)
    return (*run, "+model.options.hidden_dropout_prob=0.1", "epochs=3")


@pytest.fixture(autouse=True)
def closed_world() -> Iterator[None]:
    """A run that failed leaves its group open, as with nccl, whose end would wait for kernels that failed."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def step_that_never_waits() -> Iterator[None]:
    """From the second step of a plan on; the first one makes what the others find."""
    own_step, steps = ElasticRuntime.step, dict[int, tuple[Any, int]]()

    def step(runtime: ElasticRuntime, *arguments: Any) -> Any:
        plan, number = steps.get(id(runtime), (None, 0))
        steps[id(runtime)] = runtime.plan, number + 1 if plan is runtime.plan else 1
        is_measured = runtime.observer is not None and runtime.observer.is_due  # the host reads signals around it
        face.device.refuse_waiting(runtime.device.type == NAME and steps[id(runtime)][1] > 1 and not is_measured)
        try:
            return own_step(runtime, *arguments)
        finally:
            face.device.refuse_waiting(False)

    with mock.patch.object(ElasticRuntime, "step", step):
        yield


def train(options: tuple[str, ...], device: str, folder: Path) -> tuple[list[float], dict[str, dict[str, float]]]:
    config = loaded(*options, f"parallel.device={device}", f"cache.path={folder / 'store'}")
    with pt.ElasticTrainer.from_config(config, folder / "run") as trainer:
        losses = [step.loss for step in trainer]
        metrics = trainer.evaluate()
        trainer.save(folder / "saved")
    return losses, metrics


def check(options: tuple[str, ...], folder: Path, within: float = 1e-10) -> None:
    before = face.device.num_late()
    (expected, metrics), (losses, own) = (train(options, each, folder / each) for each in ("cpu", NAME))
    assert losses == pytest.approx(expected, rel=0, abs=within)
    assert own == metrics
    assert face.device.num_late() > before


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_on_the_device_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    check((*PICTURES, "precision=float64", *RUNS[name]), tmp_path)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_train_on_the_device_as_on_the_cpu(name: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    check((*texts, "precision=float64", *TEXTS[name]), tmp_path)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_numbers_of_16_bits_train_on_the_device_as_nearly_on_the_cpu(precision: str, tmp_path: Path) -> None:
    check((*PICTURES, f"precision={precision}", *CACHED), tmp_path, within=1e-3)


def test_features_that_nobody_waits_for_are_other_features(tmp_path: Path) -> None:
    """The mutation: a stream goes on without waiting for the event of an upload."""
    options = (*PICTURES, "precision=float64", *CACHED)
    expected, _ = train(options, "cpu", tmp_path / "cpu")
    with mock.patch.object(face.Stream, "wait_event", return_value=None):
        losses, _ = train(options, NAME, tmp_path / "device")
    assert losses != pytest.approx(expected, rel=0, abs=1e-10)


def test_a_tensor_of_the_host_does_not_mix_with_the_device() -> None:
    with pytest.raises(RuntimeError, match="to be on the same device"):
        torch.ones(2, device=NAME) + torch.ones(2)
    face.device.refuse_waiting(True)
    try:
        with pytest.raises(RuntimeError, match="the host waits"):
            torch.ones(2, device=NAME).sum().item()
    finally:
        face.device.refuse_waiting(False)

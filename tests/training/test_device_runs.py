"""Whole runs on a GPU train as on the CPU, and from its second step on no plan makes the host wait."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.jobs import TINY, loaded
from support.own import model_and_data
from support.texts import text_run, write_encoder, write_table

import pipetransformer as pt
from pipetransformer.errors import UserError
from pipetransformer.runtime.elastic import ElasticRuntime

NAME, GIB, BUDGET_GIB = "cuda", 2**30, 0.35
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
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
    "best": (*FREEZES, "evaluate.save=best"),
    "cka": ("freeze=cka", "freeze.tau=0.3", OFTEN), "autofreeze": ("freeze=autofreeze", OFTEN),
    "egeria": ("freeze=egeria", "freeze.window=2", "freeze.patience=1", "freeze.rate_drop=0.5", OFTEN),
    "freezeout": ("freeze=freezeout", "freeze.t0=0.4", OFTEN),
    "threshold": ("freeze=threshold", "freeze.signal=relative_update", "freeze.tau=0.05", OFTEN),
}  # fmt: skip
BY_ITSELF = {"Muon": 2**-8}  # timm multiplies in bfloat16 whatever the run's precision
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
def step_that_never_waits() -> Iterator[None]:
    """From the second step of a plan on; the first one makes what the others find."""
    own_step, steps = ElasticRuntime.step, dict[int, tuple[Any, int]]()

    def step(runtime: ElasticRuntime, *arguments: Any) -> Any:
        plan, number = steps.get(id(runtime), (None, 0))
        steps[id(runtime)] = runtime.plan, number + 1 if plan is runtime.plan else 1
        is_measured = runtime.observer is not None and runtime.observer.is_due  # the host reads signals around it
        refuses = runtime.device.type == NAME and steps[id(runtime)][1] > 1 and not is_measured
        torch.cuda.set_sync_debug_mode("error" if refuses else "default")
        try:
            return own_step(runtime, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

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
    (expected, metrics), (losses, own) = (train(options, each, folder / each) for each in ("cpu", NAME))
    assert losses == pytest.approx(expected, rel=0, abs=within)
    for split, values in metrics.items():
        assert own[split] == pytest.approx(values, rel=0, abs=within)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_on_a_gpu_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    check((*PICTURES, "precision=float64", *RUNS[name]), tmp_path, BY_ITSELF.get(name, 1e-10))


@pytest.mark.parametrize("name", TEXTS)
def test_texts_train_on_a_gpu_as_on_the_cpu(name: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    check((*texts, "precision=float64", *TEXTS[name]), tmp_path)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_run_of_16_bits_rounds_on_a_gpu_no_more_than_on_the_cpu(precision: str, tmp_path: Path) -> None:
    exact, on_cpu, own = (
        train((*PICTURES, f"precision={name}", *CACHED), device, tmp_path / f"{device}-{name}")[0]
        for name, device in (("float64", "cpu"), (precision, "cpu"), (precision, NAME))
    )
    errors = [max(abs(one - other) for one, other in zip(each, exact, strict=True)) for each in (on_cpu, own)]
    assert 0 < errors[1] < 4 * errors[0], "two roundings of the same size, the largest of many steps"


@pytest.mark.parametrize("kind", ["sequential", "stack", "timm", "transformers", "decoder"])
def test_a_model_that_is_on_the_gpu_trains_as_on_the_cpu_and_has_its_weights_there(kind: str, tmp_path: Path) -> None:
    ended = []
    for device in ("cpu", NAME):
        model, data = model_and_data(kind)
        weighted = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), reduction="none")
        with pt.ElasticTrainer(
            model.double().to(device), loss=weighted, train=data, optimizer=pt.AdamW(lr=1e-2), batch_size=8, epochs=2,
            precision="float64", parallel=pt.Parallel(device=device), freeze=pt.NoFreezing(),
        ) as trainer:  # fmt: skip
            losses = [step.loss for step in trainer]
        ended.append((losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}))
        assert {tensor.device.type for tensor in model.parameters()} == {device}
    (expected, weights), (losses, own) = ended
    assert losses == pytest.approx(expected, rel=0, abs=1e-10)
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-9)


def test_a_run_that_is_refused_leaves_no_world_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no plan fits"):
        train((*PICTURES, "parallel.world_size=1", "parallel.device_memory_gib=0.0001"), NAME, tmp_path / "refused")
    assert not dist.is_initialized()
    losses, _ = train(PICTURES, "cpu", tmp_path / "cpu")
    assert losses


def test_chunks_train_in_a_memory_that_the_model_exceeds(tmp_path: Path) -> None:
    """Torch's allocator takes no more than the budget: weights, gradients, activations and what libraries work with."""
    large = (*TINY[:3], "model.options={patch_size: 4, embed_dim: 512, depth: 8, num_heads: 8}", "precision=float64")
    run = (*large, "freeze=none", "epochs=2", "batch_size=16", "parallel.world_size=1")
    limit = f"parallel.device_memory_gib={BUDGET_GIB}"
    expected, _ = train(run, "cpu", tmp_path / "cpu")
    with pytest.raises(UserError, match="no plan fits"):
        train((*run, limit), NAME, tmp_path / "refused")
    with memory_limit(BUDGET_GIB):
        with pytest.raises((UserError, torch.OutOfMemoryError), match="memory"):
            train(run, NAME, tmp_path / "too large")
        take_back_memory()
        losses, _ = train((*run, limit, "parallel=chunks", "parallel.device_chunk_gib=0.12"), NAME, tmp_path / "chunks")
        assert 0.12 < torch.cuda.max_memory_reserved() / GIB <= BUDGET_GIB
    assert losses == pytest.approx(expected, rel=0, abs=1e-10)


def take_back_memory() -> None:
    """Frees what the trace of a failed run holds, and counts the most that is taken anew."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def memory_limit(gib: float) -> Iterator[None]:
    """Lets torch take no more of the GPU inside."""
    take_back_memory()
    torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

"""Measured profiles that outlive a run: of several equal jobs the first one measures, and the others read.

A profile is kept under the digest of what it depends on: kinds, shapes and settings of the layers, batches, types,
optimizer, ranks, machine and libraries. A kept one is wrong where the machine is busier or idler than it was; the first
steps of each plan correct that.
"""

import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import Tensor, nn

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.profile import (
    AffineTime,
    LayerProfile,
    LayerShard,
    MeshProfile,
    Profile,
    Traffic,
    Volume,
)
from pipetransformer.errors import UserError
from pipetransformer.mesh import SINGLE, StageMesh
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.profiling.layers import kinds_of_layers
from pipetransformer.report.environment import version_of
from pipetransformer.runtime.batch import Batch, SampleLoss
from pipetransformer.runtime.groups import broadcast_from_rank0
from pipetransformer.runtime.precision import Precision

WAIT_S = 120.0  # for another job that measures the same; after that this one measures too
FORMAT = 15
RATES = ("lr", "recipe_lr", "scratch_lr")  # by which no update takes longer
TIMES = ("forward", "input_grad", "weight_grad", "lowest_grad")
LINKS = ("link", "node_link", "allreduce_link", "node_allreduce_link")
Measurement = tuple[Profile, Cluster]


def profile_key(
    stack: LayerStack, loss: SampleLoss, batches: Sequence[Batch], samples: str, optimizer: OptimizerSpec,
    device: torch.device, precision: Precision, devices_per_node: int, meshes: Sequence[StageMesh] = (SINGLE,),
    randomness: str = "sample",
) -> str:  # fmt: skip
    """Returns a digest of all that determines a measurement, the same in equal jobs on one machine.

    Args:
        samples: Where the samples come from.
        meshes: On which the layers are measured.
        randomness: Where dropout gets its numbers.
    """
    options = {each.name: getattr(optimizer, each.name) for each in fields(optimizer) if each.name not in RATES}
    parts = (
        FORMAT,
        kinds_of_layers(stack),
        [[_settings(module) for module in stack[index].modules()] for index in range(len(stack))],
        stack.ties,
        _name(loss),
        [[*_inputs_in_brief(batch.inputs), len(batch)] for batch in batches],
        samples,
        type(optimizer).__qualname__,
        options,
        precision,
        (dist.get_world_size(), devices_per_node),
        tuple(meshes),
        randomness,
        (platform.node(), platform.processor(), os.cpu_count(), torch.get_num_threads()),
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        [version_of(name) for name in ("pipetransformer", "torch", "timm", "transformers")],
    )
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _name(function: Callable[..., object]) -> tuple[object, ...]:
    """Returns what a function is called, where it is equal in equal jobs."""
    if isinstance(function, partial):
        return *_name(function.func), function.args, sorted(function.keywords.items())
    named = function if hasattr(function, "__qualname__") else type(function)
    owner = getattr(function, "__self__", None) if named is function else function
    return named.__module__, named.__qualname__, sorted(_plain_values(owner).items())


def _settings(module: nn.Module) -> list[tuple[str, object]]:
    """Returns what shapes do not tell and costs time or memory: rates of dropout, heads, the kind of attention."""
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return sorted((_plain_values(module) | {"attention": attention}).items(), key=lambda item: item[0])


def _plain_values(owner: object) -> dict[str, object]:
    return {
        name: value for name, value in getattr(owner, "__dict__", {}).items() if isinstance(value, int | float | str)
    }


def _inputs_in_brief(inputs: Tensor | None) -> tuple[object, ...]:
    """Returns the shape, and of token ids how many different ones there are: they touch rows of an embedding."""
    if inputs is None:
        return (None,)
    return tuple(inputs.shape), None if inputs.is_floating_point() else len(inputs.unique())


def kept_or_measured(folder: Path | None, key: str, measure: Callable[[], Measurement]) -> tuple[Measurement, bool]:
    """Returns a kept measurement, or measures and keeps it. All ranks call it.

    Args:
        folder: Where measurements are kept; ``None`` measures.
        key: See :func:`profile_key`.
        measure: Measures; all ranks call it at the same time.

    Returns:
        The measurement, equal on every rank; whether it was kept.

    Raises:
        UserError: The folder cannot be written.
    """
    if folder is None:
        return measure(), False
    with ExitStack() as closing:
        found: Measurement | UserError | None = None
        file = folder / f"{key}.json"
        if dist.get_rank() == 0:
            found = _lock_and_read(file, closing)
        found = broadcast_from_rank0(found)
        if isinstance(found, UserError):
            raise found
        if found is not None:
            return found, True
        measured = measure()
        if dist.get_rank() == 0:
            _write(file, measured)
        return measured, False


def _lock_and_read(file: Path, closing: ExitStack) -> Measurement | UserError | None:
    """Takes the lock of a measurement, waits for another job that has it, and reads what there is."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file.with_suffix(".lock"))
        with suppress(Timeout):
            closing.enter_context(lock.acquire(timeout=WAIT_S))
    except OSError as error:
        return UserError(f"profile.path={file.parent} cannot be written ({error.strerror}); name another folder")
    return _read(file)


def _read(file: Path) -> Measurement | None:
    """Reads a measurement; ``None`` where there is none, or none that can be read."""
    try:
        return from_plain(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(file: Path, measured: Measurement) -> None:
    """Writes a measurement at once; without room for it the next job measures again."""
    temporary = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        temporary.write_text(json.dumps(to_plain(measured), indent=1), encoding="utf-8")
        temporary.replace(file)


def to_plain(measured: Measurement) -> dict[str, Any]:
    """Returns a measurement as plain values."""
    return {"profile": asdict(measured[0]), "cluster": asdict(measured[1])}


def from_plain(values: dict[str, Any]) -> Measurement:
    """Returns the measurement that :func:`to_plain` turned into plain values, also after a way through JSON."""
    profile, cluster = values["profile"], values["cluster"]
    layers = tuple(map(_layer, profile["layers"]))
    links = {name: None if cluster[name] is None else Link(**cluster[name]) for name in LINKS}
    meshes = tuple(_mesh(*each) for each in profile["meshes"])
    reading = {name: AffineTime(**profile[name]) for name in ("read", "read_besides")}
    known = {"layers": layers, "timed": (), "meshes": meshes, "whole": ()}
    return Profile(**profile | known | reading), Cluster(**cluster | links)


def _mesh(mesh: dict[str, Any], shards: list[dict[str, Any]], exchange: dict[str, Any] | None) -> MeshProfile:
    known = None if exchange is None else AffineTime(**exchange)
    return MeshProfile(StageMesh(**mesh), tuple(map(_shard, shards)), known)


def _layer(values: dict[str, Any]) -> LayerProfile:
    times: dict[str, Any] = {
        name: AffineTime(**values[name]) for name in (*TIMES, "checkpointing", "loss_forward") if values[name]
    }
    return LayerProfile(**values | times)


def _shard(values: dict[str, Any]) -> LayerShard:
    traffic = {name: Traffic(*(Volume(*volume) for volume in values[name])) for name in TIMES}
    copied = tuple((ranks, num_bytes) for ranks, num_bytes in values["copied_bytes"])
    return LayerShard(_layer(values["layer"]), **traffic, copied_bytes=copied)

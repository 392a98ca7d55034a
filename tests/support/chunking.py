"""Trainings whose layers come from the host in chunks, and what of them is on the device."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pipetransformer.autopipe.offload import Chunk, HostTraffic, leaving
from pipetransformer.autopipe.plan import Plan
from pipetransformer.models.layer import Layer
from pipetransformer.profiling.memory import LiveBytes
from pipetransformer.runtime import chunks, held_model, transfer
from pipetransformer.runtime.chunks import ChunkedStage, Chunks
from pipetransformer.runtime.transfer import on_device
from support.cases import Case
from support.trainings import Plans, Trace, build, go, ids_of, rate


@dataclass
class Chunked:
    """What a training by chunks gives.

    Attributes:
        traffic: Of each step.
        home_bytes: After each step, of weights, gradients and moments that lie on the host.
        held: Bytes of chunks on the device after each step.
        are_pinned: All homes are in pinned memory, from which a GPU copies by itself.
    """

    trace: Trace
    traffic: list[HostTraffic]
    home_bytes: list[int]
    held: list[int]
    are_pinned: bool = True


def sizes_of(case: Case, first: int = 0, first_active: int = 0) -> dict[Chunk, int]:
    """Bytes of the chunks of a case's layers."""
    stack, sizes = case.stack(), dict[Chunk, int]()
    for layer in range(first, len(stack)):
        num_bytes = sum(p.nbytes for p in stack[layer].parameters())
        sizes[Chunk(layer, "weights")] = num_bytes
        if layer >= first_active:
            sizes[Chunk(layer, "gradient")] = num_bytes
    return sizes


def train_chunked(case: Case, plans: Plans, folder: str, evaluates: bool = False, on_disk: bool = False) -> Chunked:
    """Every rank calls it; the figures are those of this rank's first stage."""
    runtime, loader, groups = build(case, folder, offload_folder=Path(folder) / "chunks" if on_disk else None)
    found = Chunked(Trace(), [], [], [])
    for step in range(case.num_steps):
        if step in plans:
            go(runtime, loader, plans[step], step)
        result = runtime.train_step(loader, ids_of(case, step), step, rate(step))
        found.trace.losses.append(result.loss)
        found.trace.norms.append(result.total_norm)
        stage = runtime.engine.stages[min(runtime.engine.stages)] if runtime.engine else None
        if isinstance(stage, ChunkedStage):
            found.traffic.append(stage.chunks.traffic)
            found.held.append(sum(buffer.nbytes for buffer in stage.chunks._on_device.values()))
            found.are_pinned &= all(home.is_pinned() for home in stage.chunks._homes.values())
            found.home_bytes.append(bytes_on_the_host(stage.chunks, runtime.optimizer))
        if evaluates:
            runtime.evaluate(loader, ids_of(case, step))
    loader.cache_session.release()
    found.trace.weights = runtime.weights() or {}
    loader.close()
    groups.close()
    if on_disk:
        assert not list((Path(folder) / "chunks").iterdir()), "files have no name any more"
    return found


def train_lending(case: Case, plans: Plans, folder: str) -> tuple[Chunked, int]:
    """Trains; and tells how many frozen layers were on the device at a time to compute features."""
    lent = [0]

    @contextmanager
    def counted(layers: Sequence[Layer], device: torch.device) -> Iterator[None]:
        lent.append(len(layers))
        with on_device(layers, device):
            yield

    with mock.patch.object(transfer, "on_device", counted), mock.patch.object(held_model, "on_device", counted):
        return train_chunked(case, plans, folder), max(lent)


def bytes_on_the_host(own: Chunks, optimizer: torch.optim.Optimizer | None) -> int:
    """Weights, gradients and moments that lie there."""
    states = () if optimizer is None else optimizer.state.values()
    moments = sum(
        value.nbytes for each in states for value in each.values() if isinstance(value, Tensor) and value.ndim
    )
    return moments + sum(home.nbytes for home in own._homes.values())


def chunked(plan: Plan, budget: int) -> Plan:
    """The same plan with chunks."""
    return replace(plan, recompute=True, chunk_bytes=budget)


def most_bytes_of_homes(case: Case, plans: Plans, folder: str) -> list[int]:
    """Goes to one plan after another; returns the most bytes that lay in homes at a time on the way to each."""
    runtime, loader, groups = build(case, folder, offload_folder=Path(folder) / "chunks")
    live, found, make = LiveBytes(), list[int](), chunks._home

    def counted(*arguments: Any) -> Tensor:
        home = make(*arguments)
        live.add(home)
        found[-1] = max(found[-1], live.now)
        return home

    with mock.patch.object(chunks, "_home", counted):
        for plan in plans.values():
            found.append(0)
            go(runtime, loader, plan)
    loader.close()
    groups.close()
    return found


_fetch = Chunks._fetch


def _begins_anew(self: Chunks, chunk: Chunk) -> None:
    """Forgets the part of a gradient that has left the device."""
    written, self._written = self._written, set()
    _fetch(self, chunk)
    self._written |= written


def _gradients_alone(chunks: Iterable[Chunk], first_active: int) -> list[Chunk]:
    return [chunk for chunk in leaving(chunks, first_active) if chunk.kind == "gradient"]


CHUNK_MUTATIONS: dict[str, tuple[object, str, object]] = {
    "a gradient that comes back begins at zero": (Chunks, "_fetch", _begins_anew),
    "weights stay on the device while the host changes them": (chunks, "leaving", _gradients_alone),
}


def losses_of_broken_chunks(case: Case, plans: Plans, name: str, folder: str) -> list[float]:
    """The same with chunks that are broken."""
    with mock.patch.object(*CHUNK_MUTATIONS[name]):
        return train_chunked(case, plans, folder).trace.losses

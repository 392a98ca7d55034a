"""Observes a rank under given plans."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pipetransformer.errors import NotFinite
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.fsdp import local_part
from pipetransformer.runtime.groups import ProcessGroups
from pipetransformer.runtime.result import StepResult
from pipetransformer.training.evaluate import evaluate
from pipetransformer.training.loader import BatchLoader
from support.cases import Case
from support.trainings import Plans, build, go, ids_of, rate


@dataclass
class Seen:
    """After each plan, one step under it and an evaluation: what this rank holds, and how often which layers ran."""

    held: list[list[int]] = field(default_factory=list)
    with_state: list[list[int]] = field(default_factory=list)
    ran: list[dict[int, int]] = field(default_factory=list)
    evaluated: list[dict[int, int]] = field(default_factory=list)
    bytes_moved: list[int] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)


def observe(case: Case, plans: Plans, folder: str) -> Seen:
    runtime, loader, groups = build(case, folder)
    stack, seen, ran = runtime.resident.stack, Seen(), Counter[int]()
    for index, layer in enumerate(stack.layers):
        layer.register_forward_hook(lambda *_, i=index: ran.update([i]))
    for step, plan in enumerate(plans.values()):
        seen.bytes_moved.append(go(runtime, loader, plan).bytes_moved)
        ran.clear()
        one_step(runtime, loader, case, step)
        seen.ran.append(dict(ran))
        seen.held.append(runtime.resident.held())
        seen.with_state.append([i for i in runtime.resident.held() if _has_state(runtime, i)])
        ran.clear()
        seen.scores.append(evaluate(runtime, loader, batch_size=6))
        seen.evaluated.append(dict(ran))
    loader.close()
    groups.close()
    return seen


def one_step(runtime: ElasticRuntime, loader: BatchLoader, case: Case, step: int) -> StepResult:
    return runtime.train_step(loader, ids_of(case, step), step, rate(step))


def _has_state(runtime: ElasticRuntime, layer: int) -> bool:
    state = runtime.optimizer.state if runtime.optimizer else {}
    return any(parameter in state for parameter in runtime.resident.stack[layer].parameters())


def poisoned_step(case: Case, plans: Plans, folder: str) -> tuple[str, bool]:
    """A step whose batch holds a NaN on one replica: the error of this rank, and whether its weights are as before."""
    runtime, loader, groups = build(case, folder)
    runtime.apply_plan(plans[0])
    held = {n: local_part(p.detach()) for n, p in runtime.resident.stack.named_parameters() if not p.is_meta}
    before = {name: tensor.clone() for name, tensor in held.items()}
    engine, message = runtime.engine, ""
    batch = loader.batch(np.arange(case.batch_size), engine.topology) if engine else None
    if batch is not None and batch.inputs is not None and dist.get_rank() == 0:
        batch.inputs[0] = float("nan")
    try:
        runtime.step(batch, 0.01)
    except NotFinite as error:
        message = str(error)
    loader.close()
    groups.close()
    return message, all(torch.equal(held[name], tensor) for name, tensor in before.items())


@dataclass
class Resources:
    """Resources that this process has open."""

    groups: int
    threads: int
    files: int
    resident_mib: float


def many_transitions(case: Case, plans: Plans, folder: str, counts: tuple[int, int]) -> list[Resources]:
    """Goes from plan to plan, round and round, with a step under each; what is open after so many transitions."""
    runtime, loader, groups = build(case, folder)
    seen = []
    for number in range(1, max(counts) + 1):
        runtime.apply_plan(plans[number % len(plans)])
        one_step(runtime, loader, case, number)
        if number in counts:
            seen.append(_resources(groups))
    loader.close()
    groups.close()
    return seen


def _resources(groups: ProcessGroups) -> Resources:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    own = Path("/proc/self")
    return Resources(
        len(groups),
        len(list(own.glob("task/*"))),
        len(list(own.glob("fd/*"))),
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


@dataclass
class Parked:
    """Optimizer state that waits with a rank after a step under each plan and after all weights were gathered.

    Attributes:
        parked: Layers that have it.
        devices: Types of the devices of its tensors.
        bytes_moved: Bytes that the transition to each plan sent.
        bytes_borrowed: Bytes that this rank packed to lend its layers or to gather them.
    """

    parked: list[list[int]] = field(default_factory=list)
    devices: list[set[str]] = field(default_factory=list)
    bytes_moved: list[int] = field(default_factory=list)
    bytes_borrowed: int = 0


def parked_layers(case: Case, plans: Plans, folder: str) -> Parked:
    runtime, loader, groups = build(case, folder)
    resident, seen, pack = runtime.resident, Parked(), runtime.resident.pack

    def counted(layer: int, with_state: bool = True) -> torch.Tensor:
        data = pack(layer, with_state)
        seen.bytes_borrowed += 0 if with_state else len(data)
        return data

    resident.pack = counted  # type: ignore[method-assign]
    for step, plan in plans.items():
        seen.bytes_moved.append(go(runtime, loader, plan, step).bytes_moved)
        one_step(runtime, loader, case, step)
        runtime.weights()
        seen.parked.append(sorted(resident.optimizer_state))
        states = (tensors for state in resident.optimizer_state.values() for tensors in state.values())
        seen.devices.append({tensor.device.type for tensors in states for tensor in tensors.values()})
    loader.close()
    groups.close()
    return seen

"""Bytes that a rank keeps of a sharded model."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime.engine import NUM_TOLD
from pipetransformer.runtime.fsdp import local_part
from support.cases import Case
from support.observations import one_step
from support.trainings import build


@dataclass(frozen=True)
class Held:
    """Bytes of a rank while it trains."""

    weights: int
    gradients: int
    moments: int


def held_bytes(case: Case, plan: Plan) -> Held:
    """Between the gradient of the second step and its update."""
    runtime, loader, groups = build(case, tempfile.gettempdir())
    runtime.apply_plan(plan)
    one_step(runtime, loader, case, 0)
    engine, optimizer = runtime.engine, runtime.optimizer
    assert engine is not None
    assert optimizer is not None
    batch, nothing = (
        loader.batch(np.arange(case.batch_size), engine.topology, step=1),
        torch.zeros(NUM_TOLD - 1).double(),
    )
    engine.step(batch, loss_scale=1.0, numbers=nothing)
    parameters = list(runtime.resident.stack.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    held = Held(*(_num_bytes(tensors) for tensors in (parameters, gradients, moments)))
    loader.close()
    groups.close()
    return held


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Counts the memory behind tensors once, which may be more than they show, and that of several."""
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

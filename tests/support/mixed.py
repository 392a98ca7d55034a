"""What mixed precision does on a rank: casts, measured layers, and steps whose gradient overflows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import LayerProfile
from pipetransformer.errors import NotFinite
from pipetransformer.profiling.layers import WholeLayer, profile
from pipetransformer.profiling.memory import LiveBytes
from pipetransformer.profiling.passes import measure
from pipetransformer.runtime import gradients
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.runtime.rng import PerSampleRng
from pipetransformer.training.loader import BatchLoader
from support.cases import OPTIMIZERS, SEED, Case
from support.observations import one_step
from support.plans import HEAD, plan
from support.trainings import Plans, build, go

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """What a rank saw of a step: the scale that it ran with, and whether it changed this rank's weights."""

    skipped: bool
    loss: float
    scale: float
    changed: bool


def steps_with_overflow(case: Case, plans: Plans, folder: str, ranks: dict[int, int]) -> list[Step]:
    """A training in which at each step of ``ranks`` the gradient of that rank overflows, and of no other."""
    runtime, loader, groups = build(case, folder)
    steps = []
    for number in range(case.num_steps):
        if number in plans:
            go(runtime, loader, plans[number])
        steps.append(_step(runtime, loader, case, number, ranks.get(number) == dist.get_rank()))
    loader.close()
    groups.close()
    return steps


def steps_alone(case: Case, plans: Plans, folder: str, ranks: dict[int, int]) -> list[Step]:
    """The same, with ranks that hear nothing of each other's gradients."""
    with mock.patch.object(gradients, "all_reduce_squared_norms", lambda squared, pipeline: squared):
        return steps_with_overflow(case, plans, folder, ranks)


def _step(runtime: ElasticRuntime, loader: BatchLoader, case: Case, number: int, overflows: bool) -> Step:
    active = [p for own in runtime.engine.active_parameters.values() for p in own] if runtime.engine else []
    before = [parameter.detach().clone() for parameter in active]
    hook = active[0].register_hook(lambda gradient: gradient * torch.inf) if overflows else None
    result = one_step(runtime, loader, case, number)
    if hook is not None:
        hook.remove()
    assert all(parameter.grad is None for parameter in active), "a skipped gradient must not add to the next"
    changed = any(not torch.equal(now, then) for now, then in zip(active, before, strict=True))
    return Step(result.skipped, result.loss, result.loss_scale, changed)


def steps_until_refused(case: Case, folder: str) -> tuple[list[float], str]:
    """The scales of a training whose gradient overflows in every step, and the error that ends it."""
    runtime, loader, groups = build(case, folder)
    runtime.apply_plan(plan(0, 0, [HEAD], dist.get_world_size(), 1))
    scales: list[float] = []
    try:
        while True:
            scales.append(runtime.loss_scale.value)
            _step(runtime, loader, case, 0, overflows=dist.get_rank() == 0)
    except NotFinite as error:
        return scales, str(error)
    finally:
        loader.close()
        groups.close()


class _CountCasts(TorchDispatchMode):
    def __init__(self, runtime: ElasticRuntime) -> None:
        super().__init__()
        self._weights = {p.data_ptr() for p in runtime.resident.stack.parameters() if p.requires_grad}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._weights:
            self.count += 1
        return func(*args, **(kwargs or {}))


def casts_in_a_step(case: Case, plans: list[Plan], folder: str) -> list[int]:
    """How often a weight is cast in a step under each plan."""
    runtime, loader, groups = build(case, folder)
    counts = []
    for number, current in enumerate(plans):
        runtime.apply_plan(current)
        with _CountCasts(runtime) as casts:
            one_step(runtime, loader, case, number)
        counts.append(casts.count)
    loader.close()
    groups.close()
    return counts


def measured_layers(case: Case, randomness: str = "sample") -> tuple[LayerProfile, ...]:
    stack, spec, precision = case.stack(), OPTIMIZERS[case.optimizer], PRECISIONS[case.precision]
    loader = BatchLoader.uncached(case.split(), stack.hidden_shape, SEED)
    whole = plan(0, 0, [HEAD], 1, 1)
    small, large = (
        loader.batch(np.arange(size), Topology(whole, rank=0)).to(CPU, precision.param_dtype) for size in (2, 4)
    )
    return profile(stack, case.task.loss, (small, large), spec, CPU, precision, 1, randomness).layers


def most_bytes_measuring_the_head(case: Case) -> tuple[int, int]:
    """The most bytes that live while the head is measured on eight samples, and those of its output for them."""
    stack, precision, index = case.stack(), PRECISIONS[case.precision], len(case.stack()) - 1
    loader = BatchLoader.uncached(case.split(), stack.hidden_shape, SEED)
    batch = loader.batch(np.arange(8), Topology(plan(0, 0, [HEAD], 1, 1), rank=0)).to(CPU, precision.param_dtype)
    runs = WholeLayer(stack[index], index, precision, PerSampleRng, case.task.loss)
    x = torch.ones(batch.hidden_shape, dtype=precision.param_dtype)
    output_bytes = runs(x, batch).nbytes
    with LiveBytes() as live:
        measure(runs, index, x, batch, precision)
    return live.peak, output_bytes

"""Measures what a step takes besides its layers: its fixed part, reading, waiting, and what busy ranks take from each
other."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.autopipe.cluster import Link
from pipetransformer.autopipe.cost import allreduce_volume
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.profiling.timing import (
    ENOUGH_S,
    MOST,
    added_seconds,
    timed,
    typical,
    typical_seconds,
    until_settled,
)
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import RankContext, barrier, broadcast_from_rank0
from pipetransformer.runtime.rng import sample_keys

NUM_ROUNDS, NUM_STEPS, NUM_PIPELINE_STEPS = 5, 11, 7
WAITING_AFTER_S = 0.05  # of work at least, unless a step has less
NUM_LAYERS = 3  # of a model in which there is nothing to compute
FEW_MICROBATCHES, MANY_MICROBATCHES = 2, 10
WORK_S = 0.001  # of a pass beside which a schedule is measured
OTHER_BYTES = 1 << 24  # more than the caches of a core
PIECE_BYTES = 1 << 16  # a clock is read between two of them
Value = TypeVar("Value")
Pair = tuple[Value, Value]


def measure_contention(work: Callable[[], object], device: torch.device, devices_per_node: int) -> float:
    """Measures how much slower a rank computes while all others do, too. All ranks call it.

    All ranks of the world work, then rank 0 alone, in turns.

    Args:
        work: Computes for a while.
        devices_per_node: Ranks of a node; a rank alone on its node shares nothing.

    Returns:
        The seconds together over those alone, at least 1, equal on every rank.
    """
    if devices_per_node == 1 or dist.get_world_size() == 1:
        return 1.0
    together, alone = list[float](), list[float]()
    for _ in range(NUM_ROUNDS):
        barrier(device)
        together.append(timed(work, device)[0])
        barrier(device)
        if dist.get_rank() == 0:
            alone.append(timed(work, device)[0])
    barrier(device)
    return broadcast_from_rank0(max(1.0, typical(together) / typical(alone)) if alone else 1.0)


def measure_waiting(work: Callable[[], object], work_s: float, most: int, device: torch.device) -> float:
    """Measures what ranks wait for each other at the end of a step, besides the all-reduce itself. All ranks call it.

    A link is measured while both of its ends are ready. In a step the ranks come one after the other, and what runs
    then begins on cores that have just waited. So each rank works for a while, and once more with a small all-reduce at
    the end, in turns.

    Args:
        work: One pass of a block.
        work_s: Seconds of it, equal on every rank.
        most: Passes of a step.

    Returns:
        Seconds of a step, the mean over the ranks, equal on every rank; zero in a world of one rank.
    """
    if dist.get_world_size() == 1:
        return 0.0
    num_passes = max(1, min(most, round(WAITING_AFTER_S / max(work_s, 1e-6))))
    num_rounds = int(min(MOST, max(NUM_ROUNDS, ENOUGH_S / (num_passes * max(work_s, 1e-6)))))

    def passes() -> None:
        for _ in range(num_passes):
            work()

    def passes_and_meeting() -> None:
        passes()
        barrier(device)

    meet = partial(barrier, device)
    meeting_s = typical_seconds(meet, device, NUM_STEPS)
    added_s = added_seconds(passes, passes_and_meeting, meet, num_rounds, device)
    return max(0.0, *mean_over_ranks([added_s - meeting_s], device))


def mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Returns the mean of each value over the ranks, equal on every rank. All ranks call it."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()


def measure_reading(batches: Pair[Callable[[], object]], sizes: Pair[int]) -> AffineTime:
    """Measures reading batches of a small and of a large size, on all ranks at once. All ranks call it.

    Args:
        batches: Read a batch of each size.
        sizes: Samples of both.

    Returns:
        The seconds as a line in the samples, by the mean over the ranks.
    """
    host = torch.device("cpu")
    measured = [until_settled(lambda read=read: timed(read, host)[0], lambda seconds: seconds) for read in batches]
    seconds = [typical(each) for each in measured]
    gathered: list[list[float]] = [seconds] * dist.get_world_size()
    if len(gathered) > 1:
        dist.all_gather_object(gathered, seconds)
    small_s, large_s = (statistics.mean(column) for column in zip(*gathered, strict=True))
    return AffineTime.through(sizes, (small_s, large_s))


class StepOverheads(NamedTuple):
    """Seconds of a step besides its layers.

    Attributes:
        step_s: Of a step with a replica on each rank.
        schedule_s: Of 1F1B for a micro-batch and a stage, messages between the two stages included.
        gpipe_s: The same of GPipe, whose stages wait for no message of each other while they compute.
    """

    step_s: float
    schedule_s: float = 0.0
    gpipe_s: float = 0.0


def measure_step_overheads(optimizer: OptimizerSpec, context: RankContext) -> StepOverheads:
    """Measures optimizer steps of a model in which there is next to nothing to compute. All ranks call it.

    With a replica on each rank they take what every step does besides its layers: bookkeeping, norms and clipping, the
    optimizer's own, and the sums over the ranks, waiting included. Then ranks 0 and 1 take steps of a pipeline, by each
    schedule with few and with many micro-batches. There each pass works for :data:`WORK_S`, as messages come beside the
    computing of a step, and that is subtracted. One runtime takes all of them: its process groups take longer to make
    than the steps.

    Returns:
        The seconds, equal on every rank, as rank 0 has measured them; those of pipelines are zero in a world of one
        rank.
    """
    stages, counts = ((0, 0), (1, NUM_LAYERS - 1)), (FEW_MICROBATCHES, MANY_MICROBATCHES)
    schedules = ("1f1b", "gpipe") if dist.get_world_size() > 1 else ()
    pipelines = [Plan(0, 0, stages, 1, number, schedule) for schedule in schedules for number in counts]
    step_s, *pipeline_s = _empty_step_seconds(optimizer, context, [_replicas(), *pipelines])
    pairs = zip(pipeline_s[::2], pipeline_s[1::2], strict=True)
    return StepOverheads(step_s, *(_besides_work(few_s, many_s) for few_s, many_s in pairs))


def _besides_work(few_s: float, many_s: float) -> float:
    """Returns the seconds of a micro-batch in a stage without its two passes, from steps with few and with many."""
    return max(0.0, (many_s - few_s) / (MANY_MICROBATCHES - FEW_MICROBATCHES) - 2 * WORK_S)


class ShardedBlock(NamedTuple):
    """A block as FSDP sees it.

    Attributes:
        num_parameters: Tensors, each of which is copied in and out.
        num_numbers: Of all of them.
        optimizer_s: One update of the whole block.
    """

    num_parameters: int
    num_numbers: int
    optimizer_s: float


def measure_sharding_overhead(
    optimizer: OptimizerSpec, context: RankContext, block: ShardedBlock, link: Link
) -> tuple[float, float]:
    """Measures what FSDP adds to a layer in which there is nothing to compute. All ranks call it.

    Args:
        link: Of all-reduces. By it the cost model counts two all-gathers and a reduce-scatter, each as half of an
            all-reduce; they are left out.

    Returns:
        Seconds for a layer and a micro-batch, and in addition for each byte of its parameters, as rank 0 measured them,
        equal on every rank; zero in a world of one rank.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return 0.0, 0.0
    (plain_s,) = _empty_step_seconds(optimizer, context, [_replicas()], block.num_parameters)
    numbers = -(-block.num_numbers // block.num_parameters)
    (small_s,), (large_s,) = (
        _empty_step_seconds(optimizer, context, [_replicas(fsdp=True)], block.num_parameters, each)
        for each in (1, numbers)
    )
    num_bytes = numbers * block.num_parameters * context.precision.param_dtype.itemsize
    byte_s = 1.5 * allreduce_volume(world_size) / link.bandwidth_bytes_per_s
    more_s = (large_s - small_s) / NUM_LAYERS - block.optimizer_s / world_size
    overhead_s = (small_s - plain_s) / NUM_LAYERS - 1.5 * link.latency_s
    return max(0.0, overhead_s), max(0.0, more_s / num_bytes - byte_s)


def _replicas(fsdp: bool = False) -> Plan:
    return Plan(0, 0, ((0, NUM_LAYERS - 1),), dist.get_world_size(), num_microbatches=1, fsdp=fsdp)


def _empty_step_seconds(
    optimizer: OptimizerSpec, context: RankContext, plans: Sequence[Plan], num_parameters: int = 1, num_numbers: int = 1
) -> list[float]:
    work = _Work()
    works = (work if n in (0, NUM_LAYERS - 1) else None for n in range(NUM_LAYERS))  # a layer of each stage
    layers = [Layer(_Nothing(num_parameters, num_numbers, own), _call, f"{n}.") for n, own in enumerate(works)]
    stack = LayerStack(layers, lambda x: torch.Size((len(x), 1, 1)))
    memory = torch.zeros(OTHER_BYTES // 4, device=context.device)

    def compute() -> None:
        memory.add_(1)  # a step finds the caches of the processor full of what its layers did

    def seconds(plan: Plan) -> float:
        runtime.apply_plan(plan)
        work.is_on, num_steps = (True, NUM_PIPELINE_STEPS) if plan.num_stages > 1 else (False, NUM_STEPS)
        assert runtime.topology is not None
        batch = None if runtime.topology.is_idle else _samples(plan, runtime.topology.replica)
        return typical_seconds(lambda: runtime.step(batch, 0.0), context.device, num_steps, before=compute)

    with ElasticRuntime(stack.to(context.precision.param_dtype), _NoTask(), optimizer, context) as runtime:
        return [broadcast_from_rank0(seconds(plan)) for plan in plans]


class _Work:
    """Keeps a core busy for :data:`WORK_S` of its thread's own time: what takes the core away makes it longer.

    Attributes:
        is_on: Otherwise it does nothing.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._pieces = cycle(torch.zeros(OTHER_BYTES // 4).split(PIECE_BYTES // 4))

    def __call__(self) -> None:
        end_s = time.thread_time() + WORK_S
        while time.thread_time() < end_s:
            next(self._pieces).add_(1)


class _Working(torch.autograd.Function):
    """Hands its input on after some work, and its gradient, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: _Work) -> Tensor:
        ctx.work = work
        work()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.work()
        return gradients[0], None


class _Nothing(nn.Module):
    """A layer that computes with one number of each parameter, and may work for a while."""

    def __init__(self, num_parameters: int, num_numbers: int, work: _Work | None) -> None:
        super().__init__()
        self.work = work
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(num_numbers)) for _ in range(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale[0]
        return x if self.work is None or not self.work.is_on else _Working.apply(x, self.work)


def _call(module: nn.Module, x: Tensor, **_: Tensor) -> Tensor:
    return module(x)


class _NoTask:
    """A loss of the output itself."""

    @staticmethod
    def loss(output: Tensor, _: Tensor) -> Tensor:
        return output.flatten()

    @staticmethod
    def output_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


def _samples(plan: Plan, replica: int) -> Batch:
    """Returns a sample of one number for each micro-batch of a replica."""
    number, num_samples = plan.num_microbatches, plan.num_microbatches * plan.num_replicas
    own = np.arange(num_samples)[replica * number : (replica + 1) * number]
    ones, weights = torch.ones(number, 1, 1), torch.ones(number)
    shape = (number, 1, 1)
    return Batch(own, ones, {}, torch.zeros(number), weights, sample_keys(0, 0, own), shape, float(num_samples))

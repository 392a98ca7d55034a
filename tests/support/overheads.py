"""What ranks measure besides layers, for the pool."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from filelock import FileLock

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import (
    AffineTime,
    LayerProfile,
    LayerShard,
    MeshProfile,
    Profile,
    Traffic,
    Volume,
)
from pipetransformer.mesh import StageMesh
from pipetransformer.optim.base import AdamW, Lamb, OptimizerSpec
from pipetransformer.profiling import overhead, timing
from pipetransformer.profiling.kept import Measurement, kept_or_measured, profile_key
from pipetransformer.profiling.overhead import (
    ShardedBlock,
    StepOverheads,
    measure_contention,
    measure_reading,
    measure_sharding_overhead,
    measure_step_overheads,
    measure_waiting,
)
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.precision import PRECISIONS
from support.cases import OPTIMIZERS, Case
from support.mesh_profiles import batch_of

CPU = torch.device("cpu")
Pair = tuple[float, float]
Numbers = TypeVar("Numbers")
SECOND = AffineTime(0.25, 1.5)
LAYER = LayerProfile(
    "layer", SECOND, SECOND, SECOND, 0.5, 8, 4, 2, 1, 3, 5,
    lowest_grad=AffineTime(0.5, 2.0), checkpointing=AffineTime(0.25, 0.0), loss_forward=AffineTime(0.125, 0.5),
)  # fmt: skip
EXCHANGES = Traffic(Volume(2, 8.0, 64.0), Volume(1, 0.0, 32.0))
SHARD = LayerShard(LAYER, EXCHANGES, EXCHANGES, Traffic(), EXCHANGES, ((2, 8),))
ON_MESH = MeshProfile(StageMesh(tp=2), (SHARD,), AffineTime(0.002, 0.001))
LAYERS = (LAYER, replace(LAYER, name="head"))
MEASUREMENT = (
    Profile(
        LAYERS,
        2.0,
        step_overhead_s=0.01,
        waiting_s=0.002,
        read=SECOND,
        contention=1.25,
        meshes=(ON_MESH,),
        gpipe_overhead_s=0.001,
        read_besides=SECOND,
    ),
    Cluster(2, None, Link(1e-3, float("inf")), None, 2, Link(2e-3, 1e9)),
)


def context() -> RankContext:
    return RankContext.create(CPU, PRECISIONS["float32"], 60.0)


def with_groups_left(measure: Callable[[], Numbers]) -> tuple[Numbers, int]:
    """Returns what is measured, and the process groups that are left over."""
    num_groups = len(dist.distributed_c10d._world.pg_map)
    return measure(), len(dist.distributed_c10d._world.pg_map) - num_groups


def step_overheads() -> tuple[StepOverheads, int]:
    """Measures the overhead of a step and those of pipelines."""
    return with_groups_left(lambda: measure_step_overheads(AdamW(lr=1.0), context()))


def schedule_overhead_by_a_clock(seconds: dict[str, float]) -> StepOverheads:
    """What is found where a step takes a second, and so many more for each micro-batch, by schedule."""

    def made_up(_: object, __: object, plans: Sequence[Plan]) -> list[float]:
        return [1 + plan.num_microbatches * seconds[plan.schedule] for plan in plans]

    with mock.patch.object(overhead, "_empty_step_seconds", made_up):
        return measure_step_overheads(AdamW(lr=1.0), context())


def work_of_steps() -> list[int]:
    """Returns how often each stage works in a step of each plan, by its rank."""
    calls, counted = list[float](), list[int]()

    def noting(function: Callable[[], object], *_: object, **__: object) -> float:
        calls.clear()
        function()
        counted.append(len(calls))
        return 1.0

    with (
        mock.patch.object(overhead, "typical_seconds", noting),
        mock.patch.object(overhead._Work, "__call__", side_effect=lambda: calls.append(0.0)),
    ):
        step_overheads()
    return counted


def between_empty_steps() -> list[int]:
    """Measures empty steps; returns the bytes that are computed with before those of each plan are timed."""
    seen = list[int]()

    def noting(function: Callable[[], object], _: object, __: int, before: Callable[[], object]) -> float:
        function()
        with mock.patch.object(torch.Tensor, "add_", lambda tensor, _: seen.append(tensor.nbytes)):
            before()
        return 1.0

    with mock.patch.object(overhead, "typical_seconds", noting):
        step_overheads()
    return seen


def sharding_overhead(link_s: float) -> tuple[Pair, int]:
    """Measures what FSDP adds to a layer of two parameters."""
    link = Link(link_s, 1 / link_s if link_s else inf)
    block = ShardedBlock(2, 4096, 0.0)
    return with_groups_left(lambda: measure_sharding_overhead(AdamW(lr=1.0), context(), block, link))


def sharding_overhead_by_a_clock() -> tuple[float, float]:
    """What is found where a step takes 3 s, with shards 9 s, and with shards of 4,096 numbers of each of two parameters
    6 ms more for each of them, of which updates on two ranks and a link of 1 ms and 1.5 MB/s are known."""

    def made_up(*arguments: Any) -> list[float]:
        (plan,), num_parameters, num_numbers = (*arguments[2:], 1)[:3]
        return [9.0 + 0.006 * num_parameters * (num_numbers - 1) if plan.fsdp else 3.0]

    block, link = ShardedBlock(2, 8192, 0.004 * 4096), Link(0.001, 1.5e6)
    with mock.patch.object(overhead, "_empty_step_seconds", made_up):
        return measure_sharding_overhead(AdamW(lr=1.0), context(), block, link)


def contention(devices_per_node: int) -> tuple[float, int]:
    """Returns the contention that a clock tells by which work takes 3 s together and 2 s alone, and the calls."""
    calls = list[float]()

    def made_up(work: object, _: torch.device) -> tuple[float, None]:
        assert callable(work)
        work()
        together = len(calls) % 2 == 1 or dist.get_rank() != 0
        return (3.0 if together else 2.0), None

    original, overhead.timed = overhead.timed, made_up  # type: ignore[assignment]
    try:
        return measure_contention(lambda: calls.append(0.0), CPU, devices_per_node), len(calls)
    finally:
        overhead.timed = original


def waiting(work_s: float, most: int) -> tuple[float, int]:
    """Returns the waiting that a clock tells by which ranks work 2 s and 3 s, and with an all-reduce of 0.25 s at the
    end both 4 s; and the passes of this rank."""
    calls, num_timed = list[float](), count(1)

    def made_up(work: Callable[[], object], _: torch.device) -> tuple[float, None]:
        work()
        is_alone = next(num_timed) % 2 == 1
        return (2.0 + dist.get_rank() if is_alone else 4.0), None

    with (
        mock.patch.object(timing, "timed", made_up),
        mock.patch.object(overhead, "typical_seconds", return_value=0.25),
    ):
        return measure_waiting(lambda: calls.append(0.0), work_s, most, CPU), len(calls)


def reading() -> AffineTime:
    """Measures reads of nothing."""
    return measure_reading((lambda: None, lambda: None), (1, 4))


def kept(folder: Path | None, key: str) -> tuple[Measurement, bool, int]:
    """Returns a measurement, whether it was kept, and how often this rank measured."""
    calls = list[int]()

    def measure() -> Measurement:
        calls.append(1)
        return MEASUREMENT

    measured, was_kept = kept_or_measured(folder, key, measure)
    return measured, was_kept, len(calls)


def kept_behind_a_lock(folder: Path, key: str, asked: Path) -> tuple[Measurement, bool, int]:
    """Does the same, and writes to a pipe when it asks for the lock."""
    acquire = FileLock.acquire

    def telling(self: FileLock, *args: Any, **options: Any) -> Any:
        asked.write_text("asked")
        return acquire(self, *args, **options)

    with mock.patch.object(FileLock, "acquire", telling):
        return kept(folder, key)


def keys_around_traits(case: Case) -> tuple[str, str, str]:
    """The key of a measurement before and after the optimizer has measured itself, and with another option."""
    batch = batch_of(case, 2)
    optimizer = replace(OPTIMIZERS[case.optimizer])
    assert isinstance(optimizer, Lamb)

    def key(spec: OptimizerSpec) -> str:
        return profile_key(case.stack(), case.task.loss, (batch,), "", spec, CPU, PRECISIONS[case.precision], 1)

    before = key(optimizer)
    assert optimizer.traits
    return before, key(optimizer), key(replace(optimizer, eps=1e-3))

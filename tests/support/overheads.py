"""What ranks measure besides layers, for the pool."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

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
from pipetransformer.mesh import StageMesh
from pipetransformer.optim.base import AdamW
from pipetransformer.profiling import overhead
from pipetransformer.profiling.kept import Measurement, kept_or_measured
from pipetransformer.profiling.overhead import (
    measure_contention,
    measure_reading,
    measure_sharding_overhead,
    measure_step_overhead,
)
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.precision import PRECISIONS

CPU = torch.device("cpu")
SECOND = AffineTime(0.25, 1.5)
LAYER = LayerProfile("layer", SECOND, SECOND, SECOND, 0.5, 8, 4, 2, 1, 3, 5)
EXCHANGES = Traffic(Volume(2, 8.0, 64.0), Volume(1, 0.0, 32.0))
ON_MESH = MeshProfile(StageMesh(tp=2), (LayerShard(LAYER, EXCHANGES, EXCHANGES, Traffic(), ((2, 8),)),), 0.002)
LAYERS = (LAYER, replace(LAYER, name="head"))
MEASUREMENT = (
    Profile(LAYERS, 2.0, step_overhead_s=0.01, read=SECOND, contention=1.25, meshes=(ON_MESH,)),
    Cluster(2, None, Link(1e-3, float("inf")), None, 2, Link(2e-3, 1e9)),
)


def step_overhead() -> tuple[float, int]:
    """Returns the overhead of a step, and the process groups that are left over."""
    num_groups = len(dist.distributed_c10d._world.pg_map)
    seconds = measure_step_overhead(AdamW(lr=1.0), RankContext.create(CPU, PRECISIONS["float32"], 60.0))
    return seconds, len(dist.distributed_c10d._world.pg_map) - num_groups


def sharding_overhead(link_s: float) -> tuple[float, int]:
    """The same of what FSDP adds to a layer of two parameters."""
    num_groups = len(dist.distributed_c10d._world.pg_map)
    context = RankContext.create(CPU, PRECISIONS["float32"], 60.0)
    seconds = measure_sharding_overhead(AdamW(lr=1.0), context, 2, link_s)
    return seconds, len(dist.distributed_c10d._world.pg_map) - num_groups


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

"""Who is who: the ranks of a plan's pipelines and replicas.

Either a pipeline's ranks are contiguous, so that it stays inside a node, or those that hold the same layers are. Ranks
beyond the plan are idle::

    2 replicas x 3 devices, 8 ranks     device 0  device 1  device 2        replicas_adjacent   0   1   2
                          replica 0        0         1         2                                0   2   4
                          replica 1        3         4         5        idle: 6, 7              1   3   5
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pipetransformer.autopipe.plan import Plan


@dataclass(frozen=True)
class Position:
    """A rank's place in the plan: which pipeline, and which of its devices."""

    replica: int
    device: int


def position(plan: Plan, rank: int) -> Position | None:
    """Where a rank works, ``None`` if it is idle."""
    if rank >= plan.num_devices:
        return None
    if plan.replicas_adjacent:
        device, replica = divmod(rank, plan.num_replicas)
        return Position(replica, device)
    return Position(*divmod(rank, plan.pipeline_size))


def pipeline_ranks(plan: Plan, replica: int) -> tuple[int, ...]:
    """The ranks of one pipeline, by device."""
    if plan.replicas_adjacent:
        return tuple(range(replica, plan.num_devices, plan.num_replicas))
    first = replica * plan.pipeline_size
    return tuple(range(first, first + plan.pipeline_size))


def replica_ranks(plan: Plan, device: int) -> tuple[int, ...]:
    """The ranks that hold the same layers, by replica; they average their gradients."""
    if plan.replicas_adjacent:
        first = device * plan.num_replicas
        return tuple(range(first, first + plan.num_replicas))
    return tuple(range(device, plan.num_devices, plan.pipeline_size))


def holder_ranks(plan: Plan, replica: int, layers: Iterable[int]) -> tuple[int, ...]:
    """The ranks of one pipeline that run one of the layers or several, by device."""
    wanted, ranks = set(layers), pipeline_ranks(plan, replica)
    return tuple(rank for device, rank in enumerate(ranks) if not wanted.isdisjoint(plan.device_layers(device)))

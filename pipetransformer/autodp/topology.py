"""Who is who: the ranks of a plan's pipelines and replicas.

A pipeline's ranks are contiguous, so that it stays inside a node; ranks beyond the plan are idle::

    2 replicas x 3 stages, 8 ranks      stage 0   stage 1   stage 2
                          replica 0        0         1         2
                          replica 1        3         4         5        idle: 6, 7
"""

from dataclasses import dataclass

from pipetransformer.autopipe.plan import Plan


@dataclass(frozen=True)
class Position:
    """A rank's place in the plan."""

    replica: int
    stage: int


def position(plan: Plan, rank: int) -> Position | None:
    """Where a rank works, ``None`` if it is idle."""
    if rank >= plan.num_devices:
        return None
    return Position(*divmod(rank, plan.num_stages))


def pipeline_ranks(plan: Plan, replica: int) -> tuple[int, ...]:
    """The ranks of one pipeline, by stage."""
    first = replica * plan.num_stages
    return tuple(range(first, first + plan.num_stages))


def replica_ranks(plan: Plan, stage: int) -> tuple[int, ...]:
    """The ranks that hold the same stage, by replica; they average its gradients."""
    return tuple(range(stage, plan.num_devices, plan.num_stages))

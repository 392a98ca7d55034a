"""Who sends which layer to whom at a transition: only what has to move.

2 stages x 1 replica become 1 stage x 2 replicas over layers 1 to 3, layer 0 being cached from now on::

    layer          0      1       2       3
    before        (0,)   (0,)    (1,)    (1,)
    after         (0,)  (0, 1)  (0, 1)  (0, 1)      layer 0 stays parked with rank 0
    moves                0 → 1   1 → 0   1 → 0

Of a sharded plan every rank keeps its share of every layer, cached or not, so nothing ever moves.
"""

from collections import Counter
from dataclasses import dataclass

from pipetransformer.autodp.topology import replica_ranks
from pipetransformer.autopipe.plan import Plan

Placement = tuple[tuple[int, ...], ...]
"""For each layer the ranks that hold it, ascending."""


@dataclass(frozen=True)
class Move:
    """One layer, with its optimizer state, from a rank that holds it to one that does not."""

    layer: int
    source: int
    target: int


def initial_placement(plan: Plan) -> Placement:
    """The placement at the start: layers below the cache are parked with rank 0."""
    everyone = tuple(range(plan.num_devices))
    return (everyone if plan.fsdp else (0,),) * plan.first_layer + _in_stages(plan)


def next_placement(plan: Plan, previous: Placement) -> Placement:
    """The placement that a plan needs; a cached layer, in no stage, stays with the lowest rank that held it."""
    cached = previous[: plan.first_layer]
    return (cached if plan.fsdp else tuple((min(holders),) for holders in cached)) + _in_stages(plan)


def moves(old: Placement, new: Placement) -> tuple[Move, ...]:
    """What has to move, by layer and target, the senders evenly loaded."""
    num_sent: Counter[int] = Counter()
    planned: list[Move] = []
    for layer, (holders, wanted) in enumerate(zip(old, new, strict=True)):
        for target in sorted(set(wanted) - set(holders)):
            source = min(holders, key=lambda rank: (num_sent[rank], rank))
            num_sent[source] += 1
            planned.append(Move(layer, source, target))
    return tuple(planned)


def _in_stages(plan: Plan) -> Placement:
    """The ranks of each layer that runs, in the order of the layers."""
    return tuple(
        tuple(sorted(replica_ranks(plan, stage % plan.pipeline_size)))
        for stage in range(plan.num_stages)
        for _layer in plan.stage_layers(stage)
    )

"""Transitions: which layers move between which ranks, the time that takes, and whether it pays.

2 stages x 1 replica become 1 stage x 2 replicas over layers 1 to 3, layer 0 being cached from now on::

    layer          0      1       2       3
    before        (0,)   (0,)    (1,)    (1,)
    after         (0,)  (0, 1)  (0, 1)  (0, 1)      layer 0 stays offloaded on rank 0
    moves                0 → 1   1 → 0   1 → 0

With FSDP every rank keeps its shard of every layer, cached or not, so nothing ever moves.

Where the mesh of the stages changes, each rank receives the pieces that it lacks, see
:mod:`pipetransformer.autodp.pieces`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from pipetransformer.autodp.pieces import StyledBox, pieces_by_ranks, share_of
from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.plan import Plan, layer_above
from pipetransformer.autopipe.profile import Profile
from pipetransformer.mesh import SINGLE, StageMesh, Style

Placement = tuple[tuple[int, ...], ...]
"""For each layer the ranks that hold it, ascending."""


@dataclass(frozen=True)
class Move:
    """A layer or pieces of it, with the optimizer state, from a rank that holds them to one that does not.

    Attributes:
        pieces: Boxes of the parameters of a style; empty for all that the source has.
    """

    layer: int
    source: int
    target: int
    pieces: tuple[StyledBox, ...] = ()


@dataclass(frozen=True)
class Transition:
    """The way from one plan to the next: made by the planner, carried out by the runtime.

    Attributes:
        before: The plan in force until then; ``None`` where nobody holds the layers yet.
        after: The plan from then on. It may have the same stages as ``before``, with more layers frozen.
        placement: The ranks that hold each layer from then on.
        moves: What has to move, by layer and target.
        cost_s: Predicted seconds until the first step under ``after`` can start; 0 where the stages stay.
        gain_s: Predicted seconds that ``after`` saves over the rest of the run against staying; 0 where it stays.
        reason: One sentence with the numbers, for the log.
        cached_meshes: The mesh of those that hold each cached layer: of the last plan that ran it. Empty where it is
            that of ``after``.
    """

    before: Plan | None
    after: Plan
    placement: Placement
    moves: tuple[Move, ...] = ()
    cost_s: float = 0.0
    gain_s: float = 0.0
    reason: str = ""
    cached_meshes: tuple[StageMesh, ...] = ()

    @property
    def meshes(self) -> tuple[StageMesh, ...]:
        """For each layer the mesh of those that hold it from then on: a rank has part ``rank % mesh.num_ranks``."""
        running = self.after.num_layers - len(self.cached_meshes)
        return self.cached_meshes + (self.after.mesh,) * running


def first_transition(plan: Plan, reason: str = "") -> Transition:
    """Returns the transition to the first plan: ranks load their layers, those below the cache are on rank 0 alone."""
    everyone = tuple(range(plan.num_devices))
    cached = (everyone if plan.fsdp else everyone[: plan.mesh.num_ranks],) * plan.first_layer
    return Transition(None, plan, cached + _stage_placement(plan), reason=reason)


def next_transition(last: Transition, plan: Plan) -> Transition:
    """Returns the transition from where another one ends.

    A cached layer, which is in no stage, stays with the lowest rank that held it, or that held each part of it.
    """
    cached, meshes = last.placement[: plan.first_layer], last.meshes[: plan.first_layer]
    placement = _stage_placement(plan)
    if plan.fsdp:
        placement = cached + placement
    else:
        sizes = [mesh.num_ranks for mesh in meshes]
        placement = tuple(map(lowest_of_each_part, cached, sizes)) + placement
    after = Transition(last.after, plan, placement, cached_meshes=meshes)
    return replace(
        after, moves=moves_between(last.placement, placement, (*zip(last.meshes, after.meshes, strict=True),))
    )


def lowest_of_each_part(ranks: tuple[int, ...], num_parts: int) -> tuple[int, ...]:
    """Returns the lowest rank that holds each part of a layer: a rank of a mesh has part ``rank % num_parts``."""
    return tuple(min(rank for rank in ranks if rank % num_parts == part) for part in range(num_parts))


def _stage_placement(plan: Plan) -> Placement:
    """Returns the ranks of each layer that runs, in the order of the layers."""
    topology = Topology(plan, rank=0)
    return tuple(
        tuple(sorted(topology.replicas_of(stage)))
        for stage in range(plan.num_stages)
        for _layer in plan.stage_layers(stage)
    )


def moves_between(
    old: Placement, new: Placement, meshes: Sequence[tuple[StageMesh, StageMesh]] = ()
) -> tuple[Move, ...]:
    """Returns the moves that lead from one placement to another, by layer and target, the senders evenly loaded.

    Args:
        meshes: For each layer those of the old and the new holders; empty where each rank has whole layers.
    """
    num_sent: Counter[int] = Counter()
    planned: list[Move] = []
    for layer, (holders, wanted) in enumerate(zip(old, new, strict=True)):
        mesh, next_mesh = meshes[layer] if meshes else (SINGLE, SINGLE)
        if mesh == next_mesh:
            planned += _moves_of_parts(layer, holders, wanted, mesh.num_ranks, num_sent)
        else:
            planned += [Move(layer, *one) for one in pieces_by_ranks(mesh, holders, next_mesh, wanted)]
    return tuple(planned)


def _moves_of_parts(
    layer: int, holders: tuple[int, ...], wanted: tuple[int, ...], num_parts: int, num_sent: Counter[int]
) -> Iterator[Move]:
    """Yields the moves of a layer of which each rank of a mesh has another part, part ``rank % num_parts``."""
    senders = [[(num_sent[rank], rank) for rank in holders if rank % num_parts == part] for part in range(num_parts)]
    for each in senders:
        heapify(each)  # thousands of holders may send to thousands of targets
    for target in sorted(set(wanted) - set(holders)):
        count, source = senders[target % num_parts][0]
        heapreplace(senders[target % num_parts], (count + 1, source))
        num_sent[source] += 1
        yield Move(layer, source, target)


def transfer_seconds(
    moves: Iterable[Move], profile: Profile, cluster: Cluster, num_frozen: int, parks: bool = False,
    mesh: StageMesh = SINGLE,
) -> float:  # fmt: skip
    """Returns the seconds of moves that are all made at once: those of the busiest rank or node, in one direction.

    Args:
        moves: Layers that move.
        profile: Bytes of the layers.
        cluster: Links between the ranks.
        num_frozen: Blocks that the next plan freezes.
        parks: Frozen layers bring their optimizer state along, too.
        mesh: Of the next plan: what moves as it is has the bytes of a rank's part.
    """
    first_active, size = layer_above(num_frozen), cluster.node_size
    own = profile.sharded(mesh).layers
    loads: Counter[tuple[Link, str, int]] = Counter()
    for move in moves:
        state_factor = profile.optimizer_state_factor if parks or move.layer >= first_active else 0.0
        layer = profile.layers[move.layer] if move.pieces else own[move.layer]
        share = share_of(move.pieces, _styles(move.layer, len(own))) if move.pieces else 1.0
        num_bytes = share * (layer.parameter_bytes + layer.trainable_bytes * state_factor)
        for direction, rank in (("out", move.source), ("in", move.target)):
            if size is not None and cluster.node_link and move.source // size != move.target // size:
                loads[cluster.node_link, direction, rank // size] += round(num_bytes)
            else:
                loads[cluster.link, direction, rank] += round(num_bytes)
    return max((link.seconds(num_bytes) for (link, _, _), num_bytes in loads.items()), default=0.0)


def _styles(layer: int, num_layers: int) -> tuple[Style, ...]:
    """Returns the styles of a layer's matrices, which have nearly all of its numbers."""
    return ("embedding",) if layer == 0 else ("whole",) if layer == num_layers - 1 else ("colwise", "rowwise")


def choose_transition(
    stay: Transition | None, options: Sequence[Transition], num_steps_left: int, why_not_stay: str = ""
) -> Transition:
    """Returns the transition with which the run ends first, with its gain and its reason.

    Args:
        stay: The transition that keeps the stages, at no cost; ``None`` where the current plan is no longer valid.
        options: Other transitions with their cost, the preferred one first; empty only where the plan can stay.
        num_steps_left: Steps until the run ends.
        why_not_stay: Why the current plan is no longer valid, for the reason.
    """
    if not options:
        assert stay is not None
        return replace(stay, reason="no other plan is faster")
    best, *others = sorted(options, key=lambda option: _seconds_left(option, num_steps_left))
    if stay is None:
        reason = f"the current plan is no longer valid: {why_not_stay}"
        if others:
            level, sooner_s = best.after.cache_level, _seconds_left(others[0], num_steps_left)
            how = f"caching block {level}" if level else "caching nothing"
            reason += f"; {how} ends the run {sooner_s - _seconds_left(best, num_steps_left):.3g} s sooner"
        return replace(best, reason=reason)
    stay_s, best_s = stay.after.predicted_step_s, best.after.predicted_step_s
    gain_s = (stay_s - best_s) * num_steps_left
    steps = f"{num_steps_left} steps at {best_s:.4g} s instead of {stay_s:.4g} s"
    if gain_s > best.cost_s:
        reason = f"{steps} save {gain_s:.3g} s, more than the {best.cost_s:.3g} s that the transition costs"
        return replace(best, gain_s=gain_s, reason=reason)
    effect = f"save {gain_s:.3g} s" if gain_s >= 0 else f"lose {-gain_s:.3g} s"
    reason = f"{steps} would {effect}, and the transition costs {best.cost_s:.3g} s"
    return replace(stay, reason=f"keeps the current stages: {reason}")


def _seconds_left(option: Transition, num_steps_left: int) -> float:
    return option.cost_s + num_steps_left * option.after.predicted_step_s

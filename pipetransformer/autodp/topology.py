"""A mesh of ranks with named axes: the pipelines (``pp``) and replicas (``dp``) of a plan, and the ranks of a stage.

Either the ranks of a pipeline are contiguous, so that it stays inside a node, or those that hold the same layers are.
Ranks beyond the plan are idle::

    2 replicas x 3 devices, 8 ranks     device 0  device 1  device 2        replica-first   0   1   2
                          replica 0        0         1         2                            0   2   4
                          replica 1        3         4         5        idle: 6, 7          1   3   5

Where several ranks run a stage together, they are neighbors, and ``mesh`` is the last axis. Its own axes are those of
:class:`~pipetransformer.mesh.StageMesh`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from pipetransformer.autopipe.plan import Plan

Ranks = tuple[int, ...]

PIPELINE_AXIS, REPLICA_AXIS, MESH_AXIS = "pp", "dp", "mesh"


@dataclass(frozen=True)
class Topology:
    """One rank's view of a plan. It is resolved once per plan; idle ranks have no position in it.

    Attributes:
        plan: The plan in force.
        rank: A rank of the world.
    """

    plan: Plan
    rank: int

    @cached_property
    def mesh_shape(self) -> dict[str, int]:
        """The size of each axis. Ranks fill the mesh in row-major order, so neighbours lie along the last axis."""
        axes = {REPLICA_AXIS: self.plan.num_replicas, PIPELINE_AXIS: self.plan.pipeline_size}
        if self.plan.rank_order == "replica-first":
            axes = dict(reversed(axes.items()))
        size = self.plan.mesh.num_ranks
        return axes if size == 1 else {**axes, MESH_AXIS: size}

    @cached_property
    def _strides(self) -> dict[str, int]:
        """The distance between neighbours along each axis, in ranks."""
        sizes = list(self.mesh_shape.values())
        return {axis: prod(sizes[index + 1 :]) for index, axis in enumerate(self.mesh_shape)}

    @cached_property
    def coordinates(self) -> dict[str, int] | None:
        """The rank's index along each axis; ``None`` for an idle rank."""
        if self.is_idle:
            return None
        return {axis: self.rank // self._strides[axis] % size for axis, size in self.mesh_shape.items()}

    @cached_property
    def num_ranks(self) -> int:
        """The ranks of the mesh; those of the world beyond it are idle."""
        return prod(self.mesh_shape.values())

    @property
    def is_idle(self) -> bool:
        return self.rank >= self.num_ranks

    @property
    def replica(self) -> int:
        """The pipeline of a rank that is not idle."""
        return self._own[REPLICA_AXIS]

    @property
    def device(self) -> int:
        """The place in its pipeline of a rank that is not idle."""
        return self._own[PIPELINE_AXIS]

    @property
    def mesh_rank(self) -> int:
        """The place among those that run its stage together of a rank that is not idle."""
        return self._own.get(MESH_AXIS, 0)

    @property
    def share(self) -> int:
        """The part of the global batch that a rank that is not idle reads, of ``plan.num_shares``."""
        mesh = self.plan.mesh
        return self.replica * mesh.dp_shard + mesh.coordinate(self.mesh_rank)[mesh.row_axes[0]]

    @property
    def is_first(self) -> bool:
        """True on the device of the lowest stage, which reads the samples."""
        return not self.is_idle and self.device == 0

    @property
    def is_last(self) -> bool:
        """True on the device of the highest stage, which has the head."""
        return not self.is_idle and self.device == self.plan.pipeline_size - 1

    @property
    def stages(self) -> range | None:
        """The stages that the rank runs, ascending; ``None`` for an idle rank."""
        return None if self.is_idle else self.plan.device_stages(self.device)

    @property
    def layers(self) -> list[int]:
        """The layers that the rank runs, ascending; none on an idle rank."""
        return [] if self.is_idle else self.plan.device_layers(self.device)

    @property
    def pipeline_ranks(self) -> Ranks:
        """The ranks of this rank's pipeline, by device."""
        return self.ranks_along(PIPELINE_AXIS, self._own)

    @property
    def replica_ranks(self) -> Ranks:
        """The ranks that run the same layers as this one, by replica; they all-reduce their gradients."""
        return self.ranks_along(REPLICA_AXIS, self._own)

    @property
    def reading_ranks(self) -> Ranks:
        """A rank that reads the samples of each share of the batch, of the first stage, by share."""
        mesh = self.plan.mesh
        rows = [mesh.rank_of(dict.fromkeys(mesh.shape, 0) | {mesh.row_axes[0]: row}) for row in range(mesh.dp_shard)]
        first_ranks = self.ranks_along(REPLICA_AXIS, {PIPELINE_AXIS: 0})
        return tuple(rank + row for rank in first_ranks for row in rows)

    @property
    def sharing_ranks(self) -> Ranks:
        """The ranks that run this rank's stage together, it included, by their place in the mesh."""
        return self._together(self.rank)

    def _together(self, rank: int) -> Ranks:
        size = self.plan.mesh.num_ranks
        return tuple(range(rank // size * size, (rank // size + 1) * size))

    @property
    def model_ranks(self) -> Ranks:
        """The ranks that have the model of this rank's replica between them."""
        return self._model_ranks(self.replica)

    def _model_ranks(self, replica: int) -> Ranks:
        pipeline = self.ranks_along(PIPELINE_AXIS, {REPLICA_AXIS: replica})
        return tuple(sorted(other for rank in pipeline for other in self._together(rank)))

    def ranks_along(self, axis: str, coordinates: Mapping[str, int]) -> Ranks:
        """Returns the ranks along one axis that have the given coordinates on the others."""
        first = sum(index * self._strides[other] for other, index in coordinates.items() if other != axis)
        stride = self._strides[axis]
        return tuple(range(first, first + stride * self.mesh_shape[axis], stride))

    def all_groups(self) -> Iterator[Ranks]:
        """Yields all groups along an axis, pipelines first, in an order that is the same on every rank.

        With a mesh also those inside of it, and those of the ranks that have a model between them.
        """
        for axis in (PIPELINE_AXIS, *(axis for axis in self.mesh_shape if axis != PIPELINE_AXIS)):
            others = {other: range(size) for other, size in self.mesh_shape.items() if other != axis}
            for indices in product(*others.values()):
                yield self.ranks_along(axis, dict(zip(others, indices, strict=True)))
        if self.plan.mesh.num_ranks > 1:
            for first in range(0, self.num_ranks, self.plan.mesh.num_ranks):
                yield from (ranks for _, ranks in self.plan.mesh.groups(first))
            yield from (self._model_ranks(replica) for replica in range(self.plan.num_replicas))

    def holders(self, layers: Iterable[int], replica: int | None = None) -> Ranks:
        """Returns the ranks of one pipeline that run at least one of the layers, by device.

        Args:
            layers: Layers over the whole model.
            replica: The pipeline; this rank's own if left out.
        """
        wanted = set(layers)
        ranks = self.ranks_along(PIPELINE_AXIS, {REPLICA_AXIS: self.replica if replica is None else replica})
        return tuple(
            rank for device, rank in enumerate(ranks) if not wanted.isdisjoint(self.plan.device_layers(device))
        )

    def replicas_of(self, stage: int) -> Ranks:
        """Returns the ranks that run a stage, by replica and place in the mesh."""
        first_ranks = self.ranks_along(REPLICA_AXIS, {PIPELINE_AXIS: stage % self.plan.pipeline_size})
        return tuple(other for rank in first_ranks for other in self._together(rank))

    @property
    def _own(self) -> dict[str, int]:
        assert self.coordinates is not None, f"rank {self.rank} is idle"
        return self.coordinates

"""One rank's view of a stage mesh: its axes with their process groups, and exchanges of plain tensors along them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pipetransformer.mesh import Axes, Exchange, StageMesh, Style


@dataclass(frozen=True)
class MeshAxis:
    """The ranks along one axis of a mesh.

    Attributes:
        group: Their process group; ``None`` where this rank is alone.
        index: Of this rank.
        rounds_once: A sum of numbers of 16 bits is rounded once; otherwise in every addition.
    """

    size: int
    index: int
    group: ProcessGroup | None = None
    rounds_once: bool = True

    def summed(self, x: Tensor) -> Tensor:
        """Returns a tensor in the type in which it is summed: the sum of two numbers is rounded once in any."""
        return widened(x) if self.rounds_once and self.size > 2 else x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenates the ranks' parts along a dimension."""
        if self.size == 1:
            return x
        x = x.movedim(dim, 0).contiguous()
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x, group=self.group)
        return gathered.movedim(0, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sums over the ranks, of which each gets its part of a dimension."""
        if self.size == 1:
            return x
        parts = self.summed(x).movedim(dim, 0).contiguous()
        own = parts.new_empty((parts.shape[0] // self.size, *parts.shape[1:]))
        dist.reduce_scatter_tensor(own, parts, group=self.group)
        return own.movedim(0, dim).to(x.dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums over the ranks; the argument stays as it is."""
        if self.size == 1:
            return x
        total = self.summed(x).contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total.to(x.dtype)

    def rotate(self, block: Tensor, received: Tensor) -> Tensor:
        """Sends a block to the next rank of the ring, and receives that of the rank before.

        Args:
            block: Contiguous.
            received: Is filled, and returned.
        """
        assert self.group is not None, "a ring has several ranks"
        ranks = dist.get_process_group_ranks(self.group)
        to, source = ranks[(self.index + 1) % self.size], ranks[(self.index - 1) % self.size]
        operations = [
            dist.P2POp(dist.isend, block, to, self.group),
            dist.P2POp(dist.irecv, received, source, self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received


def widened(x: Tensor) -> Tensor:
    """Returns numbers of 16 bits as float32, and others as they are."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x


class RankMesh:
    """The mesh as one of its ranks sees it.

    Args:
        mesh: The ranks that run a stage together.
        rank: This one, counted in the mesh.
        groups: The process groups of :meth:`StageMesh.groups` that this rank belongs to, by axes.

    Attributes:
        place: Where in a layer the computation is: ``embed``, ``hidden``, ``inner`` or ``whole``. It says how a tensor
            is split from which a mask is drawn.
        num_tokens: T of the batches that come next, (B, T, D) between the layers.
        num_rings: How often attention has gone around the ring.
    """

    num_tokens: int
    num_rings = 0

    def __init__(self, mesh: StageMesh, rank: int, groups: Mapping[Axes, ProcessGroup]) -> None:
        self.mesh, self.rank, self.groups, self.place = mesh, rank, groups, "hidden"
        coordinate = mesh.coordinate(rank)
        rounds_once = mesh.reduce_dtype == "float32"
        self.axes = {
            name: MeshAxis(size, coordinate[name], groups.get((name,)), rounds_once)
            for name, size in mesh.shape.items()
        }

    @property
    def hidden(self) -> MeshAxis:
        """The axis along which the width of the hidden state is split, where it is."""
        return self.axes[self.mesh.hidden_axis]

    @property
    def inner(self) -> MeshAxis:
        """The axis along which heads are split."""
        return self.axes[self.mesh.inner_axis]

    @cached_property
    def tokens(self) -> MeshAxis:
        """The axis along which tokens are split."""
        return self.axes.get("cp", MeshAxis(1, 0))

    def token_sizes(self, num_tokens: int) -> list[int]:
        """Returns the tokens of each rank along the token axis, which differ by one at most."""
        return [len(part) for part in torch.arange(num_tokens).tensor_split(self.tokens.size)]

    def rows(self, x: Tensor) -> Tensor:
        """Returns this rank's rows of the hidden state, of those of its part of the batch.

        Only 3d splits them further than the batch itself is: dp_shard or x is what the loader divides by.
        """
        return _rows(x, [self.axes[name] for name in self.mesh.row_axes[1:]])

    def inner_rows(self, x: Tensor) -> Tensor:
        """Returns this rank's rows inside attention and MLP, of those of its part of the batch."""
        return _rows(x, [self.axes[name] for name in self.mesh.inner_row_axes[1:]])

    def copies(self, style: Style) -> ProcessGroup | None:
        """Returns the group of the ranks that have the same part of a style's parameters; ``None`` for one alone."""
        return self.groups.get(self.mesh.copy_axes(style))

    def is_first_copy(self, style: Style) -> bool:
        """Returns True on one rank of those that have the same part."""
        return all(self.axes[axis].index == 0 for axis in self.mesh.copy_axes(style))

    @property
    def is_first_copy_of_rows(self) -> bool:
        """True on one rank of those that compute the outputs of the same rows."""
        return all(axis.index == 0 for name, axis in self.axes.items() if name not in self.mesh.row_axes)

    def hidden_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of this rank's part of the hidden state.

        Args:
            shape: (B, T, D) of the whole of it, with the rows that the mesh shares out.
        """
        num_rows, num_tokens, width = shape
        for axis in self.mesh.row_axes[1:]:
            num_rows //= self.axes[axis].size
        own_tokens = self.token_sizes(num_tokens)[self.tokens.index]
        return num_rows, own_tokens, width // self.hidden.size if self.mesh.splits_hidden else width

    def along(self, exchange: Exchange | None) -> tuple[MeshAxis, int | None] | None:
        """Returns the axis and the dimension of an exchange; ``None`` where this rank is alone along it."""
        if exchange is None or self.axes[exchange.axis].size == 1:
            return None
        return self.axes[exchange.axis], exchange.dim


def _rows(x: Tensor, axes: Sequence[MeshAxis]) -> Tensor:
    for axis in axes:
        x = x.chunk(axis.size)[axis.index]
    return x

"""Exchanges of a mesh that one rank only pretends, and counts: shapes, kernels and Python are those of a step.

An all-gather repeats the rank's own part, a reduce-scatter takes its first part, an all-reduce copies.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipetransformer.mesh import StageMesh
from pipetransformer.runtime.mesh import MeshAxis, RankMesh

Tally = Counter[str]
"""Exchanges so far: ``collectives`` and ``messages``, and the bytes that a rank receives in them."""


Meet = Callable[[str, int, Tensor], object]
"""``meet(name, num_ranks, own)``: makes an exchange of that name with what this rank gives to it."""


def nothing(name: str, num_ranks: int, own: Tensor) -> None:
    """Does nothing: a rank that pretends meets no other."""


@dataclass
class Pretended:
    """Exchanges that a rank only pretends.

    Attributes:
        tally: Counts them.
        meet: Is called at each of them.
    """

    tally: Tally = field(default_factory=Counter)
    meet: Meet = nothing

    def count(self, name: str, num_ranks: int, own: Tensor, num_bytes: int) -> None:
        """Counts an exchange.

        Args:
            name: Of :class:`~pipetransformer.runtime.mesh.MeshAxis`' function.
            num_ranks: Of the axis.
            own: What this rank gives to it.
            num_bytes: What a rank receives.
        """
        kind = "messages" if name == "rotate" else "collectives"
        self.tally[kind] += 1
        self.tally[f"{kind}_bytes"] += num_bytes
        self.meet(name, num_ranks, own)


@dataclass(frozen=True)
class PretendedAxis(MeshAxis):
    """Rank 0 of an axis without other ranks.

    Attributes:
        exchanges: Those of all axes of a mesh.
    """

    exchanges: Pretended = field(default_factory=Pretended)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return x
        self.exchanges.count("all_gather", self.size, x, (self.size - 1) * x.nbytes)
        return torch.cat([x] * self.size, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return x
        summed = self.summed(x)
        self.exchanges.count("reduce_scatter", self.size, summed, (self.size - 1) * summed.nbytes // self.size)
        parts = summed.movedim(dim, 0).contiguous()
        working = parts.clone() if parts.is_cpu else parts  # gloo sums in a copy
        return working[: len(parts) // self.size].clone().movedim(0, dim).to(x.dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        summed = self.summed(x)
        self.exchanges.count("all_reduce", self.size, summed, 2 * (self.size - 1) * summed.nbytes // self.size)
        return summed.contiguous().clone().to(x.dtype)

    def rotate(self, block: Tensor, received: Tensor) -> Tensor:
        self.exchanges.count("rotate", self.size, block, received.nbytes)
        return received.zero_()


class PretendedMesh(RankMesh):
    """Rank 0 of a mesh without other ranks.

    Attributes:
        exchanges: Those along all axes.
    """

    def __init__(self, mesh: StageMesh) -> None:
        super().__init__(mesh, 0, {})
        self.exchanges = Pretended()
        self.axes = {
            name: PretendedAxis(axis.size, 0, rounds_once=axis.rounds_once, exchanges=self.exchanges)
            for name, axis in self.axes.items()
        }

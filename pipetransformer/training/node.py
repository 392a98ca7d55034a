"""The nodes of a run and this rank's place in its own, from the environment that the launcher sets."""

import math
import os
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch.distributed as dist


@dataclass(frozen=True)
class LocalRank:
    """This rank within its node.

    Attributes:
        index: Of the node.
        local_rank: Of this process on the node.
        local_world_size: Processes of the node.
    """

    index: int
    local_rank: int
    local_world_size: int

    @classmethod
    def here(cls) -> "LocalRank":
        """Reads the environment."""
        names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(os.environ[name]) for name in names))


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a run, in the order of their ranks.

    Attributes:
        sizes: Ranks of each node.
        index: Of this node.
    """

    sizes: tuple[int, ...]
    index: int

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.sizes)

    @property
    def devices_per_node(self) -> int:
        """Ranks per node. Where nodes differ in size it is their greatest common divisor, so that no group of that many
        consecutive ranks crosses from one node to the next."""
        return math.gcd(*self.sizes)

    def of_rank(self, rank: int) -> int:
        """Returns the node of a rank."""
        return bisect_right(list(accumulate(self.sizes)), rank)

    @classmethod
    def here(cls) -> "NodeLayout":
        """Gathers the nodes of all ranks. Collective."""
        nodes = [LocalRank(0, 0, 1)] * dist.get_world_size()
        dist.all_gather_object(nodes, LocalRank.here())
        sizes = tuple(node.local_world_size for node in nodes if node.local_rank == 0)
        return cls(sizes, bisect_right(list(accumulate(sizes)), dist.get_rank()))


ONE_NODE = NodeLayout((1,), 0)

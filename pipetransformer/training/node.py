"""This process's place among those of its machine, from what the launcher puts into the environment."""

import math
import os
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch.distributed as dist


@dataclass(frozen=True)
class LocalRank:
    """Attributes: index of the node; worker, local_world_size: this process among those of the node."""

    index: int
    local_rank: int
    local_world_size: int

    @classmethod
    def here(cls) -> "LocalRank":
        names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(os.environ[name]) for name in names))


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a run, numbered as their ranks are.

    Attributes:
        count: How many.
        index: This one's place among them.
        sizes: Ranks of each.
    """

    sizes: tuple[int, ...]
    index: int

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def devices_per_node(self) -> int:
        """Ranks that lie together. Where nodes differ in size it is their greatest common divisor, so that no run of
        that many ranks crosses from one node to the next."""
        return math.gcd(*self.sizes)

    def of_rank(self, rank: int) -> int:
        """The node of a rank."""
        return bisect_right(list(accumulate(self.sizes)), rank)

    @classmethod
    def here(cls) -> "NodeLayout":
        """Asks all ranks; every rank calls it."""
        nodes = [LocalRank(0, 0, 1)] * dist.get_world_size()
        dist.all_gather_object(nodes, LocalRank.here())
        sizes = tuple(node.local_world_size for node in nodes if node.local_rank == 0)
        return cls(sizes, bisect_right(list(accumulate(sizes)), dist.get_rank()))


ONE_NODE = NodeLayout((1,), 0)

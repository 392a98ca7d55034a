"""This process's place among those of its machine, from what the launcher puts into the environment."""

import math
import os
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Node:
    """Attributes: index of the node; worker, num_workers: this process among those of the node."""

    index: int
    worker: int
    num_workers: int

    @classmethod
    def here(cls) -> "Node":
        names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(os.environ[name]) for name in names))


def devices_per_node() -> int:
    """Ranks that lie together on a node, equal on every rank.

    Ranks are numbered node by node. Where nodes differ in size it is their greatest common divisor, so that no run of
    that many ranks crosses from one node to the next.
    """
    sizes = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, Node.here().num_workers)
    return math.gcd(*sizes)

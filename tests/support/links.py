"""What ranks measure of their links, for the pool."""

import os
import time
from unittest import mock

import torch
import torch.distributed as dist

from pipetransformer.profiling.network import Pair, measure_all_reduces, measure_messages
from pipetransformer.training.world import NodeLayout

BYTES_PER_S = 1e8
Links = tuple[Pair, Pair | None]


def links(devices_per_node: int, latency_s: float) -> tuple[Links, Links]:
    """Messages and all-reduces, over links between nodes that take their time if asked to."""
    send, all_reduce = dist.send, dist.all_reduce

    def slow_send(message: torch.Tensor, peer: int) -> None:
        if dist.get_rank() // devices_per_node != peer // devices_per_node:
            time.sleep(latency_s + message.nbytes / BYTES_PER_S)
        send(message, peer)

    def slow_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        num_ranks = dist.get_world_size(group)
        if num_ranks > devices_per_node:
            time.sleep(latency_s + 2 * (num_ranks - 1) / num_ranks * tensor.nbytes / BYTES_PER_S)
        all_reduce(tensor, group=group)

    slow = {"send": slow_send, "all_reduce": slow_all_reduce}
    measurements = (measure_messages, measure_all_reduces)
    with mock.patch.multiple(dist, **slow if latency_s else {"send": send}):
        messages, all_reduces = (measure(torch.device("cpu"), devices_per_node) for measure in measurements)
    return messages, all_reduces


def node_size(local_world_sizes: list[int]) -> int:
    local = {"GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(local_world_sizes[dist.get_rank()])}
    with mock.patch.dict(os.environ, local):
        return NodeLayout.here().devices_per_node

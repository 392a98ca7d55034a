"""Measures the links once, before the first plan: within a node and between nodes.

A message and an all-reduce are lines of their own: in gloo an all-reduce adds up on the cores that also send, at about
a third of a message's bandwidth and ten times its latency, and all devices do it at once.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from pipetransformer.profiling.timing import median_seconds
from pipetransformer.runtime.signals import broadcast_from_rank0

NUM_REPEATS = 9
NUM_BYTES = 1 << 22  # large enough for the bandwidth to count, small enough for a slow network
FREE = (0.0, float("inf"))
Pair = tuple[float, float]
"""Latency in seconds and bandwidth in bytes per second."""


def measure_messages(device: torch.device, devices_per_node: int) -> tuple[Pair, Pair | None]:
    """What a message from one rank to another sees, equal on every rank.

    Args:
        devices_per_node: Ranks of a node, which are numbered one after the other.

    Returns:
        Within a node, :data:`FREE` where a node has one rank only; between nodes, ``None`` where there is one node.
    """
    world_size = dist.get_world_size()
    within = _message(1, device) if devices_per_node > 1 else FREE
    return within, _message(devices_per_node, device) if devices_per_node < world_size else None


def measure_all_reduces(device: torch.device, devices_per_node: int) -> tuple[Pair, Pair | None]:
    """The same for a ring all-reduce, which moves ``2 (R - 1) / R`` times its bytes over each link.

    All nodes measure within at the same time; between nodes it is one ring through all ranks.
    """
    world_size = dist.get_world_size()
    within = FREE
    if devices_per_node > 1:
        group, _ = dist.new_subgroups(devices_per_node)
        within = _all_reduce(devices_per_node, group, device)
        dist.destroy_process_group(group)
    return within, _all_reduce(world_size, None, device) if devices_per_node < world_size else None


def _message(other: int, device: torch.device) -> Pair:
    """Between rank 0 and another rank, while all others wait; there and back, as two clocks need not agree."""

    def send_layers(num_bytes: int) -> float:
        if dist.get_rank() not in (0, other):
            return 0.0
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        steps = (dist.send, dist.recv) if dist.get_rank() == 0 else (dist.recv, dist.send)

        def there_and_back() -> None:
            for step in steps:
                step(message, other - dist.get_rank())

        return median_seconds(there_and_back, device, NUM_REPEATS) / 2

    return _line(send_layers, 1.0)


def _all_reduce(num_ranks: int, group: dist.ProcessGroup | None, device: torch.device) -> Pair:
    def reduce(num_bytes: int) -> float:
        tensor = torch.zeros(-(-num_bytes // 4), device=device)
        return median_seconds(lambda: dist.all_reduce(tensor, group=group), device, NUM_REPEATS)

    return _line(reduce, 2 * (num_ranks - 1) / num_ranks)


def _line(seconds: Callable[[int], float], moved: float) -> Pair:
    """Through a tiny and a large size, as rank 0 sees them."""
    measured = torch.tensor([seconds(1), seconds(NUM_BYTES)], dtype=torch.float64)
    latency_s, large_s = broadcast_from_rank0(measured).tolist()
    return latency_s, moved * NUM_BYTES / max(large_s - latency_s, 1e-9)

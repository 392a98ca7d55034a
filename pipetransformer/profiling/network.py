"""Measures once, before the first plan, the time of messages, all-reduces and copies.

Messages and all-reduces are measured within a node and between nodes. They are lines of their own: in gloo an
all-reduce adds up on the cores that also send, at about a third of a message's bandwidth and ten times its latency, and
all devices do it at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from pipetransformer.host_copies import empty_for
from pipetransformer.profiling.timing import typical_seconds
from pipetransformer.runtime.groups import batch_scheduled, broadcast_from_rank0

NUM_REPEATS = 9
NUM_COPIED_BYTES = 1 << 24
FEW_BYTES = 1 << 12  # gloo cuts a tensor into parts, and one number is too few for all messages of a ring
NUM_BYTES = 1 << 22  # large enough for the bandwidth to count, small enough for a slow network
FREE = (0.0, float("inf"))
Pair = tuple[float, float]
"""Latency in seconds and bandwidth in bytes per second."""


def measure_messages(device: torch.device, devices_per_node: int) -> tuple[Pair, Pair | None]:
    """Measures a message from one rank to another. All ranks call it.

    Args:
        device: The device of the message's tensor.
        devices_per_node: Ranks of a node, which are numbered one after the other.

    Returns:
        Within a node, :data:`FREE` where a node has one rank only; between nodes, ``None`` where there is one node.
        Equal on every rank.
    """
    world_size = dist.get_world_size()
    within = _message(1, device) if devices_per_node > 1 else FREE
    return within, _message(devices_per_node, device) if devices_per_node < world_size else None


def measure_all_reduces(device: torch.device, devices_per_node: int) -> tuple[Pair, Pair | None]:
    """Measures a ring all-reduce, which moves ``2 (R - 1) / R`` times its bytes over each link. All ranks call it.

    All nodes measure within at the same time; between nodes it is one ring through all ranks.

    Returns:
        As :func:`measure_messages`.
    """
    world_size = dist.get_world_size()
    within = FREE
    if devices_per_node > 1:
        with batch_scheduled(device.type):
            group, _ = dist.new_subgroups(devices_per_node)
        with destroyed(group):
            within = _all_reduce(devices_per_node, group, device)
    return within, _all_reduce(world_size, None, device) if devices_per_node < world_size else None


@contextmanager
def destroyed(group: ProcessGroup | None) -> Iterator[None]:
    """Destroys a group at the end, also after a failure."""
    try:
        yield
    finally:
        dist.destroy_process_group(group)


def _message(other: int, device: torch.device) -> Pair:
    """Measures between rank 0 and another rank, there and back as their clocks differ, while all others wait."""

    def one_way_seconds(num_bytes: int) -> float:
        if dist.get_rank() not in (0, other):
            return 0.0
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        steps = (dist.send, dist.recv) if dist.get_rank() == 0 else (dist.recv, dist.send)

        def there_and_back() -> None:
            for step in steps:
                step(message, other - dist.get_rank())

        return typical_seconds(there_and_back, device, NUM_REPEATS) / 2

    return _latency_and_bandwidth(one_way_seconds, 1.0)


def _all_reduce(num_ranks: int, group: ProcessGroup | None, device: torch.device) -> Pair:
    def seconds(num_bytes: int) -> float:
        tensor = torch.zeros(-(-num_bytes // 4), device=device)
        return typical_seconds(lambda: dist.all_reduce(tensor, group=group), device, NUM_REPEATS)

    return _latency_and_bandwidth(seconds, 2 * (num_ranks - 1) / num_ranks)


def _latency_and_bandwidth(seconds: Callable[[int], float], moved: float) -> Pair:
    """Fits latency and bandwidth to a small and a large size, as rank 0 measures them.

    Args:
        seconds: Measures a number of bytes.
        moved: Bytes over the link per byte.
    """
    measured = torch.tensor([seconds(FEW_BYTES), seconds(NUM_BYTES)], dtype=torch.float64)
    small_s, large_s = broadcast_from_rank0(measured).tolist()
    bandwidth = moved * (NUM_BYTES - FEW_BYTES) / max(large_s - small_s, 1e-9)
    return max(0.0, small_s - moved * FEW_BYTES / bandwidth), bandwidth


def measure_host_copies(device: torch.device) -> float:
    """Returns the seconds per byte of a copy from host memory to a device, those of the slowest rank. All call it.

    Where the device is the CPU, a copy goes to another buffer in memory.
    """
    source = empty_for(device, NUM_COPIED_BYTES, torch.uint8).zero_()
    target = torch.empty_like(source, device=device)
    copy_s = typical_seconds(lambda: target.copy_(source), device, num_repeats=5)
    slowest = torch.tensor(copy_s, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item() / NUM_COPIED_BYTES

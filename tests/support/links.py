"""What ranks measure of their links, for the pool."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pipetransformer.profiling import timing
from pipetransformer.profiling.network import Pair, measure_all_reduces, measure_messages
from pipetransformer.training.world import NodeLayout
from support.meshes import scheduled_as_at_first

BYTES_PER_S = 1e8
Links = tuple[Pair, Pair | None]


def links(devices_per_node: int, latency_s: float) -> tuple[Links, Links]:
    """Messages and all-reduces; with a latency, by a clock that only links between nodes move on."""
    send, recv, all_reduce, seconds = dist.send, dist.recv, dist.all_reduce, [0.0]

    def slow_send(message: torch.Tensor, peer: int) -> None:
        pass_by(message, peer)
        send(message, peer)

    def slow_recv(message: torch.Tensor, peer: int) -> None:
        pass_by(message, peer)
        recv(message, peer)

    def pass_by(message: torch.Tensor, peer: int) -> None:
        if dist.get_rank() // devices_per_node != peer // devices_per_node:
            seconds[0] += latency_s + message.nbytes / BYTES_PER_S

    def slow_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        num_ranks = dist.get_world_size(group)
        if num_ranks > devices_per_node:
            seconds[0] += latency_s + 2 * (num_ranks - 1) / num_ranks * tensor.nbytes / BYTES_PER_S
        all_reduce(tensor, group=group)

    slow = {"send": slow_send, "recv": slow_recv, "all_reduce": slow_all_reduce}
    clock = SimpleNamespace(perf_counter=lambda: seconds[0]) if latency_s else timing.time
    measurements = (measure_messages, measure_all_reduces)
    with mock.patch.multiple(dist, **slow if latency_s else {"send": send}), mock.patch.object(timing, "time", clock):
        messages, all_reduces = (measure(torch.device("cpu"), devices_per_node) for measure in measurements)
    return messages, all_reduces


def node_size(local_world_sizes: list[int]) -> int:
    local = {"GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(local_world_sizes[dist.get_rank()])}
    with mock.patch.dict(os.environ, local):
        return NodeLayout.here().devices_per_node


def policies_of_measured_groups() -> list[int]:
    """The policies under which a rank makes the groups by which it measures links."""
    seen: list[int] = []

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (seen.append(os.sched_getscheduler(0)), make(*args))[1]

    made = {name: noting(getattr(dist, name)) for name in ("new_group", "new_subgroups")}
    with scheduled_as_at_first(), mock.patch.multiple(dist, **made):
        measure_all_reduces(torch.device("cpu"), devices_per_node=2)
    return seen

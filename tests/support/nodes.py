"""Agents of ``torchrun`` on one machine that stand for nodes, and worlds that ranks open by themselves."""

import os
import socket
from unittest import mock

import torch
import torch.distributed as dist

from pipetransformer.config.sections import Parallel
from pipetransformer.training import meeting, world

NODE_ALL_REDUCE_S = 0.25
"""Between nodes, where all else takes whole seconds or next to nothing."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def of_two_nodes(port: int, num_processes: int) -> tuple[str, ...]:
    """The arguments with which the agent of either node starts."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test")
    return ("--nnodes", "2", "--nproc-per-node", str(num_processes), *rendezvous)


def sums_of_worlds(port: int, number: int) -> list[float]:
    """A rank that leaves the pool's world for some of its own, one after the other; what each of them sums up."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()
    sums = []
    try:
        joined = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": rank, "WORLD_SIZE": world_size}
        with mock.patch.dict(os.environ, joined), mock.patch.object(meeting, "_joined", {}):
            for _ in range(number):
                with world.open_world(Parallel(device="cpu", timeout_s=60)):
                    total = torch.ones(1)
                    dist.all_reduce(total)
                    dist.all_reduce(total, group=dist.new_group([0, 1]))
                    sums.append(total.item())
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return sums


def sums_in_shared_worlds() -> tuple[list[float], bool]:
    """What a rank sums up in a world that two contexts use, of which the first one leaves first; whether it stays."""
    dist.destroy_process_group()
    sums = []

    def sum_up() -> None:
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(total.item())

    try:
        first, second = (world.open_world(Parallel(device="cpu", timeout_s=60)) for _ in range(2))
        first.__enter__()
        sum_up()
        second.__enter__()
        sum_up()
        first.__exit__(None, None, None)
        sum_up()
        second.__exit__(None, None, None)
        return sums, dist.is_initialized()
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

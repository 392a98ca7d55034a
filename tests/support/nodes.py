"""Agents of ``torchrun`` on one machine that stand for nodes."""

import socket

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

"""Without a GPU, ranks are forked from one process that has imported what they need.

Importing takes longer than all else at the start, and where cores are few ranks would wait for each other's imports::

    launcher   [imports of its own][start ranks ...            waits ...
    server     [imports of ranks           ][fork, fork]
    ranks                                         [open the world ...
"""

import multiprocessing
import os
import signal
from collections.abc import Iterable
from multiprocessing import forkserver
from pathlib import Path

OF_ALL = ("pipetransformer.fork_server", "pipetransformer.training.job", "torchmetrics.functional")
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
DEFAULT_CPU_PROCESSES = 2


def start_method(device: str) -> str:
    """How ranks start on ``parallel.device``: a GPU is lost to those forked from a process that has looked at it, as
    libraries may when they are imported, and machines with GPUs have cores enough."""
    may_be_gpu = device == "cuda" or (device == "auto" and any(Path(file).exists() for file in GPU_FILES))
    return "spawn" if may_be_gpu else "forkserver"


def share_cores(world_size: int) -> None:
    """Gives each rank its share of the cores, where the user has not; libraries look when they are imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))


def begin(device: str, world_size: int | None, libraries: Iterable[str]) -> None:
    """Has the server import already, where there will be one; it ends with this process. Before torch is imported.

    Args:
        libraries: What model and dataset need.
    """
    if start_method(device) == "forkserver":
        share_cores(world_size or DEFAULT_CPU_PROCESSES)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*OF_ALL, *libraries])
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the server, which would print where it was
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, before)


def listen() -> None:
    """Lets a forked rank be interrupted, which the server is not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

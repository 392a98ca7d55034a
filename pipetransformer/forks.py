"""Without a GPU, ranks are forked from one process that has imported what they need.

Importing takes longer than all else at the start, and where cores are few ranks would wait for each other's imports::

    launcher   [imports of its own][start ranks ...            waits ...
    server     [imports of ranks           ][fork, fork]
    ranks                                         [open the world ...
"""

import multiprocessing
import os
import select
import signal
import threading
from multiprocessing import forkserver
from pathlib import Path

OF_ALL = ("pipetransformer.training.job", "torchmetrics.functional")
OF_MODALITY = {"image": ("timm",), "text": ("transformers",)}
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


def begin(device: str, world_size: int | None, modality: str) -> None:
    """Has the server import already, where there will be one; it ends with this process. Before torch is imported."""
    if start_method(device) == "forkserver":
        share_cores(world_size or DEFAULT_CPU_PROCESSES)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*OF_ALL, *OF_MODALITY[modality]])
        forkserver.ensure_running()


def end_with(launcher: int) -> None:
    """Interrupts this rank when the launcher ends, even by a kill: it is not a forked rank's parent, who would tell.

    Args:
        launcher: Its process id.
    """
    if not hasattr(os, "pidfd_open"):
        return  # of Linux alone
    try:
        ending = os.pidfd_open(launcher)
    except ProcessLookupError:
        signal.raise_signal(signal.SIGINT)
        return
    threading.Thread(target=_interrupt_after, args=(ending,), name="launcher-watch", daemon=True).start()


def _interrupt_after(ending: int) -> None:
    select.select([ending], [], [])
    os.kill(os.getpid(), signal.SIGINT)

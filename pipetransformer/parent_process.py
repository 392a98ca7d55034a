"""Ends a process with the one that has started it, which only Linux does."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER = "PIPETRANSFORMER_LAUNCHER"
"""Variable with the number of the launcher's process, for its fork server; 1 where a container runs nothing else."""


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks Linux to signal this process when the thread that has started it ends; does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)

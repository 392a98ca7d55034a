"""Ends a process with the one that has started it, and tells when that began, which only Linux does."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from threading import Thread

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER = "PIPETRANSFORMER_LAUNCHER"
"""Variable with the number of the launcher's process, for its fork server; 1 where a container runs nothing else."""

LOOK_S = 1.0  # between two looks for the parent


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks Linux to signal this process when the thread that has started it ends; does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_unheard(parent: int, has_heard: Callable[[], bool], wait_s: float = 60.0) -> None:
    """Ends this process where its parent has ended and it does not hear of the signal in ``wait_s``.

    Python's handlers run between two instructions, and torch looks for a store that has gone in one, for 20 minutes.

    Args:
        parent: The parent's process.
        has_heard: Returns whether the handler of the signal has run.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        time.sleep(wait_s)
        if not has_heard():
            os._exit(1)

    Thread(target=watch, daemon=True).start()


def start_time() -> datetime:
    """Returns the moment after which a run folder is named: now, or under torchrun its start.

    Ranks that torchrun starts again so find the run of the ranks before them.
    """
    return (parent_start() if "TORCHELASTIC_RUN_ID" in os.environ else None) or datetime.now()


def torchrun_start() -> datetime | None:
    """Returns when torchrun began; ``None`` where nobody can tell, as behind a script that starts the ranks for it."""
    try:
        is_between = b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return None
    return None if is_between else parent_start()


def parent_start() -> datetime | None:
    """Returns when the parent began; ``None`` where the system does not tell."""
    try:
        values = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        system = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
        booted_s = next(int(line.split()[1]) for line in system if line.startswith("btime "))
        return datetime.fromtimestamp(booted_s + int(values[19]) / os.sysconf("SC_CLK_TCK"))  # field 22 of proc(5)
    except (OSError, ValueError, IndexError, StopIteration):
        return None

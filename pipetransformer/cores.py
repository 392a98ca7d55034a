"""The cores of this machine that a process may use: a container or a batch system may give it a few of them."""

import os


def num_cores() -> int:
    """Returns the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""The cores of this machine that a process may use, a few of them in a container or batch system; and their name."""

import os
import platform
from contextlib import suppress
from functools import cache


def num_cores() -> int:
    """Returns the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def processor_name() -> str:
    """Returns the name of the processor, as far as the system tells it."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

"""Host memory that a step frees stays with the process for the next step, and goes back at a transition.

glibc hands large blocks back to the system as soon as they are free. The next step asks for them again, and each of
their pages is mapped and zeroed on first touch, which is 3 to 7 % of a step (``experiments/step_time/allocator``).
Every step of a plan needs the same memory, and another plan other memory::

    plan   |  step  step  step  |  transition: :func:`trim`  |  step  step
    pages  |  map   keep  keep  |  unmap what is free        |  map   keep

Where the user tunes the allocator, or the C library is another, nothing here has an effect.
"""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = 2**31 - 1  # the largest threshold that mallopt takes, in bytes
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which a user tunes the allocator; see mallopt(3)."""


def keep_freed_memory() -> None:
    """Keeps the memory that this process frees."""
    _call("mallopt", M_MMAP_MAX, 0)
    _call("mallopt", M_TRIM_THRESHOLD, NEVER)


def trim() -> None:
    """Gives free memory back to the system."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    if sys.platform != "linux" or any(setting in os.environ for setting in SETTINGS):
        return
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:  # musl and other libraries have none
        function(*arguments)

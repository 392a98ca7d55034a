"""Ends a run on Ctrl-C, on SIGTERM, or on SIGUSR1, by which Slurm warns before a job's time is over.

While steps run, the first signal only asks: ranks agree with the next loss, save, and stop at the same step. Before and
after that, and at a second signal, the run stops at once.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

QUIT = signal.SIGINT
HANGUP = signal.SIGHUP  # of a terminal, to all its processes: the launcher alone hears it, and hands SIGTERM on
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAME_S = 1.0  # a terminal sends a signal to the launcher and to the ranks, and the launcher forwards it

_requested: signal.Signals | None = None
_at_s = 0.0
_defers = False


def listen() -> None:
    """Makes these signals ask for the end of the run."""
    global _requested, _defers
    _requested, _defers = None, False
    for each in SIGNALS:
        signal.signal(each, _ask)


def requested() -> signal.Signals | None:
    """Returns the first signal that came, or ``None``."""
    return _requested


def asks_to_requeue() -> bool:
    """Returns whether a signal came after which the run is to be started again: any but Ctrl-C."""
    return _requested not in (None, QUIT)


def is_requested() -> bool:
    """Returns whether a signal came."""
    return _requested is not None


def check() -> None:
    """Raises KeyboardInterrupt when a signal came at a moment at which raising would have been lost."""
    if _requested is not None:
        raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[None]:
    """Leaves the first signal inside to those who look at :func:`requested`."""
    global _defers
    check()
    _defers = True
    try:
        yield
    finally:
        _defers = False


def _ask(number: int, frame: FrameType | None) -> None:
    global _requested, _at_s
    is_second = _requested is not None
    if is_second and (time.monotonic() - _at_s < SAME_S or not _defers):
        return  # the same one, or the clean-up of the first, which is not disturbed
    if not is_second:
        _requested, _at_s = signal.Signals(number), time.monotonic()
    if (is_second or not _defers) and not _in_finalizer(frame):
        raise KeyboardInterrupt


def _in_finalizer(frame: FrameType | None) -> bool:
    """Returns whether a finalizer or a weak reference's callback runs: Python drops exceptions raised there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename.endswith("weakref.py"):
            return True
        frame = frame.f_back
    return False

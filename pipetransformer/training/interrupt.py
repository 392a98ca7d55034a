"""Ends a run on Ctrl-C or on the launcher's SIGTERM."""

import signal
from types import FrameType

_requested = False


def listen() -> None:
    """Makes the first of these signals raise KeyboardInterrupt; later ones do not disturb the clean-up."""
    global _requested
    _requested = False
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)


def check() -> None:
    """Raises KeyboardInterrupt when a signal came at a moment at which raising would have been lost."""
    if _requested:
        raise KeyboardInterrupt


def _stop(_: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True
    for later in (signal.SIGINT, signal.SIGTERM):
        signal.signal(later, _ignore)  # with SIG_IGN, Python tells of one that is already on its way
    if not _in_finalizer(frame):
        raise KeyboardInterrupt


def _ignore(_: int, __: FrameType | None) -> None:
    pass


def _in_finalizer(frame: FrameType | None) -> bool:
    """Returns whether a finalizer or a weak reference's callback runs: Python drops exceptions raised there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename.endswith("weakref.py"):
            return True
        frame = frame.f_back
    return False

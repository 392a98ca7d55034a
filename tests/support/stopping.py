"""A run in an open world that a signal asks to stop."""

import signal
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

from pipetransformer.training import evaluate, interrupt
from support.faults import Fault, play_with_fault


def play_until_stopped(fault: Fault, rank: int, overrides: tuple[str, ...], folder: Path) -> str:
    """One rank of a run whose rank gets signals, the first of which counts."""
    before = {each: signal.getsignal(each) for each in interrupt.SIGNALS}
    interrupt.listen()
    try:
        with mock.patch.object(interrupt, "SAME_S", 1e9), mock.patch.object(evaluate, "ASK_EVERY", 1):
            return play_with_fault(replace(fault, local_rank=rank), overrides, folder)
    finally:
        interrupt.listen()  # forgets it
        for each, handler in before.items():
            signal.signal(each, handler)


def play_to_its_end(fault: Fault, overrides: tuple[str, ...], folder: Path) -> tuple[str, float]:
    """One rank of a run; gives its error, and when it ended by a clock that all ranks share."""
    return play_with_fault(fault, overrides, folder), time.monotonic()

"""A run in an open world one of whose ranks hangs for longer than the others wait."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from support.faults import HAS_HUNG, Fault, play_with_fault

TIMEOUT_S = 3


def play_until_timed_out(fault: Fault, rank: int, overrides: tuple[str, ...], folder: Path) -> str:
    """One rank of the run; gives the error with which it ends."""
    world = dist.group.WORLD  # which the run has not opened, and would have with this time-out
    assert world is not None
    world._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=TIMEOUT_S))
    HAS_HUNG.clear()
    try:
        return play_with_fault(replace(fault, local_rank=rank), overrides, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

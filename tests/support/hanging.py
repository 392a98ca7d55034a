"""A run in an open world one of whose ranks hangs until the others have given it up."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pipetransformer.runtime.groups import own_store
from support.faults import HANG_S, HAS_HUNG, Fault, play_with_fault

TIMEOUT_S, GIVEN_UP = 3, "given up"


def play_until_timed_out(fault: Fault, rank: int, overrides: tuple[str, ...], folder: Path) -> str:
    """One rank of the run; gives the error with which it ends."""
    world = dist.group.WORLD  # which the run has not opened, and would have with this time-out
    assert world is not None
    world._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=TIMEOUT_S))
    HAS_HUNG.clear()
    with _hanging_until_given_up() if dist.get_rank() == rank else _telling():
        try:
            return play_with_fault(replace(fault, local_rank=rank), overrides, folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@contextmanager
def _hanging_until_given_up() -> Iterator[None]:
    store = own_store()

    def end() -> None:
        store.wait([GIVEN_UP], timedelta(seconds=HANG_S))
        HAS_HUNG.set()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end)
        yield
        ended.result()


@contextmanager
def _telling() -> Iterator[None]:
    yield
    own_store().set(GIVEN_UP, "")

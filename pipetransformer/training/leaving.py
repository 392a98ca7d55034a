"""Keeps the other ranks until rank 0 has saved what the run leaves, where all ranks end together.

A launcher ends all ranks as soon as one has ended with an error, as each does after a run that diverged::

    rank 0   steps ... diverges, summary, model/, report, a word in the store, ends
    rank 1   steps ... diverges, waits for that word ------------------------, ends
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from pipetransformer.errors import Diverged, FreezeHurts
from pipetransformer.runtime.groups import broadcast_from_rank0, own_store

WORD, POLL_S = "rank 0 has saved", 0.05
LONGEST_S = 3600.0  # a rank 0 that was killed leaves no word, and on several nodes nobody may end the others


@contextmanager
def rank0_first() -> Iterator[None]:
    """Ends on other ranks when it has ended on rank 0, unless this rank fails with an error of its own."""
    if dist.get_world_size() == 1:
        yield
        return
    token = broadcast_from_rank0(uuid4().hex)  # a world that a script has opened may see several runs
    store, together = PrefixStore(f"leaving/{token}", own_store()), False
    try:
        yield
        together = True
    except (Diverged, FreezeHurts):  # on which the ranks agree
        together = True
        raise
    finally:
        with suppress(DistError):  # the store has ended, and with it the run
            if dist.get_rank() == 0:
                store.set(WORD, "")
            elif together:
                _wait(store)


def _wait(store: Store) -> None:
    end = time.monotonic() + LONGEST_S
    while not store.check([WORD]) and time.monotonic() < end:
        time.sleep(POLL_S)

"""The store in which the ranks of one start meet, whatever earlier starts have left in it.

torchrun's agents keep their store from one start of the ranks to the next, and each counts the restarts of its own
ranks: after a death, other nodes may have other counts. So the ranks agree on a name for the keys of their start::

    rank r                                             rank 0
    hello/r = a name that no other process has  ───►   waits for the names of all ranks; some may be of dead ones
    waits for answer/<its name>                 ◄───   answer/<name> = the name of this start, for each that it reads
    <start>/here/r                              ───►   reads the names again until all ranks are here
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pipetransformer.errors import UserError

JOINED_BY = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1  # between two looks: so late a start may be, so often each rank asks
_joined: dict[tuple[str | None, ...], tuple[dist.Store, int, int]] = {}
_worlds = count()


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Returns the store that joins the ranks by the environment, with this rank and their number.

    Each start of the ranks by a launcher, and each training of a script, has keys of its own: with those of the one
    before, groups would find the addresses of ranks that died or of groups that are closed (seen with torch 2.15). The
    store stays open for the next training: a rank that comes early would join one that rank 0 is about to close.

    Raises:
        UserError: Some ranks do not come in time.
    """
    key = tuple(os.environ.get(name) for name in JOINED_BY)
    if key not in _joined:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        while isinstance(store, dist.PrefixStore):  # which may hold the agent's own count of restarts
            store = store.underlying_store
        store = dist.PrefixStore(f"pipetransformer/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
        _joined[key] = dist.PrefixStore(agree(store, rank, world_size, timeout), store), rank, world_size
    store, rank, world_size = _joined[key]
    store.set_timeout(timeout)
    return dist.PrefixStore(f"world-{next(_worlds)}", store), rank, world_size


def agree(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Returns a name that the ranks which call this together have in common, and no others.

    Raises:
        UserError: Some of them do not come in time.
    """
    if rank == 0:
        return _lead(store, range(1, world_size), timeout)
    own = uuid4().hex
    store.set(f"hello/{rank}", own)
    answer = f"answer/{own}"
    for _ in _looks(timeout, lambda: [0]):
        if store.check([answer]):
            break
    start = store.get(answer).decode()
    store.set(_here(start, rank), "")
    return start


def _lead(store: dist.Store, others: Sequence[int], timeout: timedelta) -> str:
    """Answers all other ranks, in rank 0."""
    start, hellos, answered = f"start-{uuid4().hex}", [f"hello/{rank}" for rank in others], set[bytes]()
    heres = [_here(start, rank) for rank in others]
    for _ in _looks(timeout, lambda: [rank for rank in others if not store.check([_here(start, rank)])]):
        if not others or store.check(heres):
            break
        names = set(store.multi_get(hellos)) if store.check(hellos) else set()
        for name in names - answered:
            store.set(f"answer/{name.decode()}", start)
        answered |= names
    return start


def _here(start: str, rank: int) -> str:
    return f"{start}/here/{rank}"


def _looks(timeout: timedelta, missing: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Yields until the time is over, with growing pauses in which a signal is heard."""
    end, pause_s = time.monotonic() + timeout.total_seconds(), FIRST_PAUSE_S
    while time.monotonic() < end:
        yield
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    ranks = missing()
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, the first is {ranks[0]},"
    where = ":".join(os.environ.get(name, "") for name in JOINED_BY[:2])
    raise UserError(
        f"{named} did not come to the start within parallel.timeout_s={timeout.total_seconds():g}; look for what its "
        f"process or node says, whether it reaches {where}, or raise parallel.timeout_s="
    )

"""Where each rank is, so that a time-out names the rank that hangs and what it was in.

A thread of each rank publishes its position in the store that joins the ranks; a step only sets two variables::

    rank 0   step ... step, waits for rank 1 ... time-out: "rank 1 did not answer ...: is in an evaluation at step 80"
    rank 1   step ... step, evaluation, hangs
    store    position/0, position/1, and failed/0 of each rank that has given up
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from pipetransformer.collectives import is_collective
from pipetransformer.errors import RankHangs
from pipetransformer.runtime.groups import own_store

PUBLISH_S = 1.0  # between two publications
GIVE_UP_S = 3.0  # in which ranks that time out together do so
ROUNDS = 30  # of looking for those that have given up

START, BETWEEN, STEP = "the start", "what follows a training step", "a training step"
_phase, _step = START, 0


@contextmanager
def inside(phase: str, step: int) -> Iterator[None]:
    """Marks what this rank does, for example ``an evaluation``, before optimizer step ``step``."""
    global _phase, _step
    before = _phase, _step
    _phase, _step = phase, step
    yield  # not after an error, which happened inside
    _phase, _step = (BETWEEN, step) if phase == STEP else before


@contextmanager
def naming_hangs(timeout_s: float) -> Iterator[None]:
    """Turns a time-out inside into the name of the rank that hangs.

    Args:
        timeout_s: After which a collective fails.

    Raises:
        RankHangs: A collective timed out, and some ranks have not given up.
    """
    global _phase, _step
    _phase, _step = START, 0
    if dist.get_world_size() == 1:
        yield
        return
    store, is_over = PrefixStore("position", own_store()), Event()
    thread = Thread(target=_publish, args=(PrefixStore("position", own_store()), is_over), daemon=True, name="position")
    thread.start()
    try:
        yield
    except Exception as error:
        message = _message(store, timeout_s) if _gives_up(store, error) else ""
        if not message:
            raise
        raise RankHangs(message) from error
    finally:
        is_over.set()
        thread.join()


def _publish(store: Store, is_over: Event) -> None:
    published = ""
    with suppress(DistError):  # the store has ended before this rank
        while not published or not is_over.wait(PUBLISH_S):
            position = f"{_phase} at step {_step:,} (process {os.getpid()} on {socket.gethostname()})"
            if position != published:
                store.set(f"at/{dist.get_rank()}", position)
                published = position


def _gives_up(store: Store, error: BaseException) -> bool:
    """Tells the others that this rank has failed; returns whether it waited for them too long.

    Disks, networks and readers of samples time out too.
    """
    with suppress(DistError):
        store.set(f"failed/{dist.get_rank()}", "")
    return is_collective(error) and "timed out" in str(error).lower()


def _message(store: Store, timeout_s: float) -> str:
    """Returns the line that names the ranks that have not given up; empty where all have."""
    silent, told = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()], list[str]()
    with suppress(DistError):
        for _ in range(ROUNDS):
            silent = [rank for rank in silent if not store.check([f"failed/{rank}"])]
            time.sleep(GIVE_UP_S / ROUNDS * bool(silent))
        there = [rank for rank in silent if store.check([f"at/{rank}"])]
        told = [f"rank {rank} is in {store.get(f'at/{rank}').decode()}" for rank in there]
    if not silent:
        return ""
    own = f"rank {dist.get_rank()} waited in {_phase} at step {_step:,}"
    names = "rank" + "s" * (len(silent) > 1) + " " + ", ".join(map(str, silent))
    return (
        f"{names} did not answer within {timeout_s:g} s: {'; '.join([*told, own])}; raise parallel.timeout_s where "
        "that may take so long"
    )

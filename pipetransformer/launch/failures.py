"""Finds out why a run failed: each rank leaves a record of its error, and the launcher looks for the first cause.

When one rank fails, the others soon fail too: their connection to it closes, or torch's launcher interrupts them. So
the cause is the earliest error that is neither of both; if no rank has one, a rank that left no record was killed.
"""

import json
import os
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from pipetransformer.collectives import is_collective
from pipetransformer.config.names import in_options
from pipetransformer.errors import CacheLost, RankFailed, RankHangs, RankLost, StoreFailed, UserError
from pipetransformer.report.secrets import redact

OWN, CONNECTION, INTERRUPT = "own", "connection", "interrupt"

SERVER_GONE = 255  # what multiprocessing takes for the exit code of a rank when the fork server does not answer
SERVER_KILLED = (
    "the process that the ranks are forked from was killed, perhaps for want of memory; free some and start again"
)


@dataclass(frozen=True)
class Failure:
    """The error with which a rank ended.

    Attributes:
        origin: :data:`OWN`, or how another rank's end showed here: :data:`CONNECTION` or :data:`INTERRUPT`.
        is_users: The user can fix it; ``text`` is then all there is to show.
        is_hang: It waited for a rank that hangs.
        is_cache: It read from a store of the cache that fails.
        time_s: When it was recorded, in seconds since the epoch.
    """

    rank: int
    origin: str
    is_users: bool
    is_hang: bool
    is_cache: bool
    text: str
    trace: str
    time_s: float


def alive(folder: Path) -> FileLock:
    """Returns a lock for a rank to hold as long as it lives; it is free when the process has ended, however it did."""
    return FileLock(folder / f"{os.getpid()}.lock")


def wait_for_ranks(folder: Path, timeout_s: float) -> None:
    """Waits until no rank is :func:`alive`; ends those that still are after ``timeout_s``.

    When the fork server is killed, its ranks count as ended, and yet save the run. What comes next must not meet them.
    """
    end = time.monotonic() + timeout_s
    for file in folder.glob("*.lock"):
        lock = FileLock(file)
        try:
            lock.acquire(timeout=max(0.0, end - time.monotonic()))
        except Timeout:
            with suppress(ProcessLookupError):
                os.kill(int(file.stem), signal.SIGKILL)
            lock.acquire()
        lock.release()


def record(folder: Path, rank: int, error: BaseException) -> None:
    """Writes the failure of a rank to a folder that the launcher reads."""
    error = _first(error)
    is_users = isinstance(error, UserError)
    text = in_options(error) if is_users else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    kinds = isinstance(error, RankHangs), isinstance(error, StoreFailed)
    failure = Failure(rank, _origin(error), is_users, *kinds, redact(text), redact(trace), time.time())
    unfinished = folder / f"{rank}.part"  # the launcher may end this rank at any moment
    unfinished.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    unfinished.rename(folder / f"{rank}.json")


def _first(error: BaseException) -> BaseException:
    """Returns the rank's own error if it was being handled when the connection closed or an interrupt came."""
    own = error
    while _origin(own) != OWN:
        if own.__context__ is None:
            return error
        own = own.__context__
    return own


def _origin(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return INTERRUPT
    return CONNECTION if is_collective(error) or isinstance(error, ConnectionError) else OWN


def cause(folder: Path, num_ranks: int, exit_codes: dict[int, int]) -> tuple[Exception, str]:
    """Returns the error to raise for a failed run, and one line for its summary.

    Args:
        folder: Where the ranks have recorded their failures.
        exit_codes: Of the ranks whose exit code is known; negative: the signal that ended it.
    """
    failures = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("*.json")]
    failures.sort(key=lambda failure: (failure.origin != OWN, failure.origin == INTERRUPT, failure.time_s))
    silent = sorted({*range(num_ranks)} - {failure.rank for failure in failures})
    if failures and (failures[0].origin == OWN or not (silent or failures[0].origin == INTERRUPT)):
        first = failures[0]
        if first.is_hang:
            return RankLost(first.text), first.text
        if first.is_users:
            return (CacheLost if first.is_cache else UserError)(first.text), first.text
        line = f"rank {first.rank} failed: {first.text}"
        return RankFailed(f"{line}\n{first.trace}", line), first.text
    if any(exit_codes.get(rank) == SERVER_GONE for rank in silent):
        return RankLost(SERVER_KILLED, num_lost=0), SERVER_KILLED
    if early := [rank for rank in silent if exit_codes.get(rank, 0) > 0]:
        text = f"rank {early[0]} ended with exit code {exit_codes[early[0]]} before it began; its output tells why"
        return RuntimeError(text), text
    if not silent:
        return RankLost(SERVER_KILLED, num_lost=0), SERVER_KILLED
    # a signal ended these first; the launcher then ends the others, which leave no record either
    first = [rank for rank in silent if exit_codes.get(rank, 0) < 0] or silent
    killed = [rank for rank in first if exit_codes.get(rank) != -signal.SIGABRT]
    text = _killed(killed, exit_codes) if killed else _aborted(first)
    return RankLost(text, len(killed)), text


def _killed(first: list[int], exit_codes: dict[int, int]) -> str:
    names = {signal.Signals(-exit_codes[rank]).name for rank in first if rank in exit_codes}
    by = f" by {' and '.join(sorted(names))}" if names else ""
    return (
        f"{_one_of(first)} was killed{by}, perhaps for want of memory; lower batch_size or parallel.world_size, or set "
        "parallel.device_memory_gib"
    )


def _aborted(first: list[int]) -> str:
    """Returns the cause of ranks that ended themselves: nccl's watchdog does that to one that waits too long."""
    return (
        f"{_one_of(first)} ended by SIGABRT: nccl's watchdog may have ended it, because a rank did not answer within "
        "parallel.timeout_s; raise it where that may take so long, or look for another cause in the rank's output, as "
        "memory that it could not get"
    )


def _one_of(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"

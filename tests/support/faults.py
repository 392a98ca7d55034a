"""What can happen to a run and its machine, brought about at a chosen moment."""

import errno
import os
import pkgutil
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from support.jobs import Job, play
from support.pool import Pool


@dataclass(frozen=True)
class Fault:
    """Something that happens in a process whenever it comes to a place, once it has been there often enough.

    Attributes:
        target: A function of the package by its full name; it happens before a call.
        call: Of which call on, from 1.
        what: One of :data:`HAPPENINGS`.
        path: What it happens to, where it needs one.
        since: Calls count from the first call of this function on; by default from the start.
        local_rank: Only in this process of the node; by default in each.
    """

    target: str
    call: int = 1
    what: str = "kill"
    path: str = ""
    since: str = ""
    local_rank: int | None = None

    @contextmanager
    def injected(self) -> Iterator[None]:
        """While it lasts, the fault happens."""
        begun, calls = not self.since, 0

        def begin() -> None:
            nonlocal begun
            begun = True

        def happen() -> Any:
            nonlocal calls
            calls += begun
            here = self.local_rank in (None, int(os.environ["LOCAL_RANK"]))
            return HAPPENINGS[self.what](self.path) if here and begun and calls >= self.call else None

        with _before(self.target, happen), _before(self.since, begin) if self.since else nullcontext():
            yield


def _before(target: str, do: Callable[[], Any]) -> AbstractContextManager[Any]:
    """Calls ``do`` before each call of the target, or instead of it where that gives something."""
    original = pkgutil.resolve_name(target)

    def changed(*args: Any, **options: Any) -> Any:
        given = do()
        return original(*args, **options) if given is None else given

    return mock.patch(target, changed)


def _kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_all(_: str) -> None:
    os.killpg(0, signal.SIGKILL)


def _fill_the_disk(_: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _break_the_disk(_: str) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _hang(_: str) -> None:
    HAS_HUNG.wait(HANG_S)


def _meet(path: str) -> None:
    """Tells the test, by a named pipe, that the place is reached, and waits until it answers, the first time."""
    if path not in HAVE_MET:
        HAVE_MET.add(path)
        Path(path).write_text("here")
        Path(f"{path}.go").read_text()


HANG_S = 120.0  # if nobody ends it
SLOW_S = 1.0
HAVE_MET = set[str]()
HAS_HUNG = threading.Event()  # set by what ends it: a process hangs once

HAPPENINGS: dict[str, Callable[[str], Any]] = {
    "kill": _kill,
    "kill all": _kill_all,
    "fill the disk": _fill_the_disk,
    "break the disk": _break_the_disk,
    "nothing is free": lambda _: 0,
    "little is free": lambda _: 2**25,
    "remove": _remove,
    "hang": _hang,
    "meet": _meet,
    "is slow": lambda _: time.sleep(SLOW_S),
    "signal": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "Ctrl-C": lambda _: os.kill(os.getpid(), signal.SIGINT),
}


def run_with(fault: Fault, pool: Pool, world_size: int, folder: Path, *overrides: str) -> Job:
    """``run_job(..., made_up_times=True)`` to which a fault happens.

    Raises:
        EOFError: It killed a process of the pool; the pool has killed the others.
    """
    folder.mkdir(parents=True)
    errors = pool.run(world_size, play_with_fault, fault, overrides, folder)
    assert len(set(errors)) == 1, f"the ranks disagree: {errors}"
    return Job(folder, errors[0])


def play_with_fault(fault: Fault, overrides: tuple[str, ...], folder: Path) -> str:
    with fault.injected():
        return play(overrides, folder, made_up_times=True)

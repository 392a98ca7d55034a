"""Keeps a second run out of a run folder while one goes on there."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipetransformer.errors import UserError
from pipetransformer.launch.restarts import is_restarted

ORPHANS_S, POLL_S = 10.0, 0.1  # what a rank that died has forked keeps the lock until it finds that out


@contextmanager
def claimed(run_dir: Path, option: str = "hydra.run.dir") -> Iterator[None]:
    """Locks a folder itself, which leaves no file there, and goes with the process.

    Where the file system has no such locks, as many of networks, nothing happens.

    Args:
        option: By which another folder is given.

    Raises:
        UserError: Another process has it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        folder = os.open(run_dir, os.O_RDONLY)
    except OSError:  # it is told when the run writes there
        yield
        return
    try:
        if not _has_lock(folder):
            raise UserError(f"a run goes on in {run_dir}; wait until it ends, or give another {option}=")
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)  # else forked processes would keep it
        os.close(folder)


def _has_lock(folder: int) -> bool:
    """Returns whether this process has the lock now, or needs none."""
    end = time.monotonic() + ORPHANS_S * is_restarted()
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        except OSError:
            return True
        else:
            return True
        time.sleep(POLL_S)

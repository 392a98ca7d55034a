"""The lock of a store's directory: exclusive while one run may write, shared while runs only read.

Two files of the directory are locked by ``flock``, so that the kernel gives back what a killed process had::

    lock   exclusive of a run that writes, shared of each run that reads; has a line about each of them
    gate   held for an instant by whoever takes, changes or gives back the other lock

Linux changes the kind of a lock by giving it back and taking it again. Under the gate nobody comes in between.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from pipetransformer.errors import StoreInUse

LOCK, GATE = "lock", "gate"
FEATURES = "*.features"
FILLS, KEEPS, READS = "fills", "keeps", "reads"
GATE_S, GATE_POLL_S = 5.0, 0.005  # longest wait for the gate, which nobody holds for longer than writing a line
NAMELESS = "a process that has not written its name"


@dataclass(frozen=True)
class Holder:
    """A run that has locked a store.

    Attributes:
        owner: Name by which a user recognizes it: the run folder.
        pid: Its process that has the lock.
        host: The machine of this process.
        use: ``fills``: it writes now, and only reads afterwards; ``keeps``: it may write to its end; ``reads``.
        features: In words, the features that it stores.
    """

    owner: str
    pid: int
    host: str
    use: str = KEEPS
    features: str = ""

    @classmethod
    def here(cls, owner: str, use: str = KEEPS, features: str = "") -> "Holder":
        """Returns this process as a holder."""
        return cls(owner, os.getpid(), socket.gethostname(), use, features)

    def __str__(self) -> str:
        return f"{self.owner} (process {self.pid} on {self.host})"

    @property
    def may_live(self) -> bool:
        """False where its process has ended; of another machine nobody here can tell."""
        return self.host != socket.gethostname() or Path(f"/proc/{self.pid}").exists()


class StoreLock:
    """The lock of one directory in this process.

    Args:
        path: The directory.
        holder: This run.
        parts: All that the samples of this run depend on, by name.

    Attributes:
        is_shared: Other runs may read too, and nobody writes.
    """

    def __init__(self, path: Path, holder: Holder, parts: Mapping[str, str] | None = None) -> None:
        self.path, self._holder, self.parts = path, holder, parts or {}
        self.is_shared = False
        self._file = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - open as long as it is locked

    @property
    def owner(self) -> str:
        """Name of this run."""
        return self._holder.owner

    def take(self) -> None:
        """Takes the exclusive lock, or where runs only read, and this one is to read in the end, the shared one.

        Raises:
            StoreInUse: Another run has it.
        """
        with _gate(self.path):
            if self._try(fcntl.LOCK_EX):
                if not _are_free(self.path):
                    raise self._left_open()
            elif self._holder.use == FILLS and self._try(fcntl.LOCK_SH):
                self.is_shared = True
            else:
                raise in_use(self.path)
            self._write_line()

    def share(self) -> bool:
        """Makes the lock shared: other runs may read too, and this one writes no more. Returns whether it is."""
        with _gate(self.path):
            if not self._try(fcntl.LOCK_SH):
                raise in_use(self.path)  # by a process that does not know the gate
            self.is_shared = True
            self._write_line()
            return True

    def claim(self) -> bool:
        """Makes a shared lock exclusive where nobody else reads; otherwise it stays shared."""
        with _gate(self.path):
            is_alone = self._try(fcntl.LOCK_EX)  # a shared lock is lost where that fails
            if not is_alone and not self._try(fcntl.LOCK_SH):
                raise in_use(self.path)
            self.is_shared = not is_alone
            self._write_line()
            return is_alone

    def release(self) -> None:
        """Gives the lock back."""
        if not self._file.closed:
            with _gate(self.path):
                self._write_lines(self._others())
                fcntl.flock(self._file, fcntl.LOCK_UN)  # else forked processes that have it open would keep it
        self._file.close()

    def close(self) -> None:
        """Closes a lock that was not had."""
        self._file.close()

    def _left_open(self) -> StoreInUse:
        message = f"{self.path} has files that a run which was killed still has open; run again, or take another `path`"
        return StoreInUse(message, [("a run that was killed", FILLS, self._holder.features)])

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _write_line(self) -> None:
        own = replace(self._holder, use=READS) if self.is_shared else self._holder
        self._write_lines([*(self._others() if self.is_shared else []), own])

    def _others(self) -> list[Holder]:
        me = (self._holder.owner, self._holder.pid, self._holder.host)
        return [one for one in holders(self.path) if (one.owner, one.pid, one.host) != me]

    def _write_lines(self, lines: list[Holder]) -> None:
        text = "".join(json.dumps(asdict(one)) + "\n" for one in lines)
        with suppress(OSError):  # a full disk costs the names alone
            os.ftruncate(self._file.fileno(), 0)
            os.write(self._file.fileno(), text.encode())


def holders(path: Path) -> list[Holder]:
    """Returns the runs that have written their names into a directory's lock and not ended since, in their order."""
    try:
        lines = (path / LOCK).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    found = (_holder(line) for line in lines)
    return [one for one in found if one is not None and one.may_live]


def _holder(line: str) -> Holder | None:
    try:
        values = json.loads(line)
        one = Holder(**values)
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (one.owner, one.host, one.use, one.features)
    return one if type(one.pid) is int and all(type(text) is str for text in texts) else None


def in_use(path: Path) -> StoreInUse:
    """Returns the error that names those who have a directory locked."""
    found = holders(path)
    names = ", ".join(map(str, found)) or NAMELESS
    features = f", which stores {found[0].features}" if found and found[0].features else ""
    message = f"{path} is in use by {names}{features}; wait until that ends, or take another `path`"
    return StoreInUse(message, [(str(one), one.use, one.features) for one in found])


def is_locked(path: Path) -> bool:
    """Returns whether any run has locked a directory, also to a user who may only read it.

    Raises:
        OSError: This user may not even do that.
    """
    try:
        with _gate(path), _opened(path / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not _are_free(path)
    except BlockingIOError:
        return True


def _are_free(path: Path) -> bool:
    """Returns whether no process has a file of features open: those of a killed run may live a little longer."""
    for file in path.glob(FEATURES):
        if file.is_file() and not file.is_symlink():
            with open(file, "rb") as features:
                try:
                    fcntl.flock(features, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
    return True


@contextmanager
def _gate(path: Path) -> Iterator[None]:
    if not path.is_dir():  # removed while it was locked, so that nobody can come
        yield
        return
    with _opened(path / GATE) as file:
        _enter(file, path)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _opened(file: Path) -> IO[str]:
    """Opens a file to lock it, for reading alone where this user may not write it."""
    try:
        return open(file, "a", encoding="utf-8")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return open(file, encoding="utf-8")


def _enter(file: IO[str], path: Path) -> None:
    end = time.monotonic() + GATE_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise StoreInUse(
                    f"{path / GATE} stays locked; end the process that has it, or take another `path`"
                ) from None
        time.sleep(GATE_POLL_S)

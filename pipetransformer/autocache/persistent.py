"""A folder in which stores outlive their run, each with the identity of what it holds and a lock of who uses it."""

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.writable import unwritable
from pipetransformer.errors import StaleStore, StoreInUse

IDENTITY, UNFINISHED, LOCK = "identity.json", "identity.json.tmp", "lock"
NAME_LENGTH = 32
OTHER_SAMPLES = "split identity ("  # in what an identity says of another


@dataclass(frozen=True)
class StoreDir:
    """A folder that is the caller's own until it is given back.

    Attributes:
        path: The folder; all entries but ``identity.json`` and ``lock`` are the caller's to make.
        is_new: It was empty; otherwise an earlier run may have stored something.
    """

    path: Path
    is_new: bool


@contextmanager
def lock_store_dir(root: Path, identity: StoreFingerprint, owner: str, node: int = 0) -> Iterator[StoreDir]:
    """Lends the place ``<root>/<model>-<digest>/node<node>/<split>``; one process of a node opens it for all.

    The kernel takes the lock back when the process ends, however it ends. Processes that it has forked and that live
    on keep the lock of a killed one, for they may still write.

    Args:
        root: The folder of all stores; made if it is not there.
        identity: What the store holds or will hold.
        owner: Who asks, in words that another user understands: the run folder.
        node: Of the run; nodes that share a disk each have their own store.

    Raises:
        StaleStore: The folder is there and does not say that it holds this.
        StoreInUse: Another process has it.
        Unwritable: The folder cannot be made or written.
    """
    path = _path(root, identity, node)
    with ExitStack() as locked:
        try:
            path.mkdir(parents=True, exist_ok=True)
            locked.enter_context(_lock(path, owner))
            place = StoreDir(path, is_new=_claim(path, identity))
        except OSError as error:
            raise unwritable(path, error) from error
        yield place


def others(root: Path, identity: StoreFingerprint, node: int = 0) -> list[str]:
    """The other stores of this node that may hold the same samples, each by its name and how it differs."""
    own = _path(root, identity, node)
    found = sorted(path.parent for path in root.glob(f"*/{own.parent.name}/{own.name}/{IDENTITY}"))
    differences = {path: _difference(path, identity) for path in found if path != own}
    return [f"{path.relative_to(root)} {how}" for path, how in differences.items() if OTHER_SAMPLES not in how]


def _path(root: Path, identity: StoreFingerprint, node: int) -> Path:
    model = _slug(identity.model.split()[0] if identity.model.split() else "model")
    return root / f"{model}-{identity.digest()}" / f"node{node}" / _slug(identity.split_name)


def _slug(name: str) -> str:
    """Fit for the name of a folder on any disk."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).lstrip(".")[-NAME_LENGTH:] or "_"


@contextmanager
def _lock(path: Path, owner: str) -> Iterator[None]:
    with open(path / LOCK, "a", encoding="utf-8") as file:  # appending leaves what another holder has written
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreInUse(
                f"{path} is in use by {_holder(path)}; wait until that ends, or take another `path`"
            ) from None
        file.truncate(0)
        json.dump({"owner": owner, "pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # forked processes that still have it open would keep it


def _holder(path: Path) -> str:
    try:
        holder = json.loads((path / LOCK).read_text(encoding="utf-8"))
        return f"{holder['owner']} (process {holder['pid']} on {holder['host']})"
    except (ValueError, KeyError, TypeError):
        return "a process that has not said its name yet"


def _claim(path: Path, identity: StoreFingerprint) -> bool:
    """Whether the folder was empty; raises StaleStore unless it is ours now or was before."""
    held = sorted({entry.name for entry in path.iterdir()} - {LOCK, UNFINISHED})
    if not held:
        (path / UNFINISHED).write_text(identity.to_json(), encoding="utf-8")
        (path / UNFINISHED).replace(path / IDENTITY)
        return True
    if IDENTITY not in held:
        raise _stale(path, f"has no {IDENTITY} and holds {len(held)} other entries, the first is {held[0]}")
    if difference := _difference(path, identity):
        raise _stale(path, difference)
    return False


def _stale(path: Path, reason: str) -> StaleStore:
    return StaleStore(f"{path} {reason}; its features are not read: delete it, or take another `path`")


def _difference(path: Path, identity: StoreFingerprint) -> str:
    """How a store differs from what is asked for; empty if it does not."""
    try:
        found = StoreFingerprint.from_json((path / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"has an {IDENTITY} that cannot be read ({error})"
    difference = identity.explain_difference(found)
    return f"differs in {difference}" if difference else ""

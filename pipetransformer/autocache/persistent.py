"""Directories whose stores outlive a run, each with a fingerprint of its features and a lock of its user."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipetransformer.autocache.about import ABOUT, UNFINISHED_ABOUT, changed_parts, origin, read_about
from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.store_lock import FILLS, GATE, KEEPS, LOCK, Holder, StoreLock
from pipetransformer.autocache.writable import unwritable
from pipetransformer.errors import StaleStore

IDENTITY, UNFINISHED = "identity.json", "identity.json.tmp"
NAME_LENGTH = 32
OTHER_SAMPLES = "split identity ("  # part of a difference between fingerprints of other samples
UNNAMED = "files that the data names, such as pictures, or the library that reads them have changed"


@dataclass(frozen=True)
class StoreDir:
    """A locked directory.

    Attributes:
        path: The directory; all entries but ``identity.json``, ``lock`` and ``gate`` belong to the holder.
        is_new: It was empty; otherwise an earlier run may have stored something.
        lock: Exclusive, or shared with other runs that only read.
    """

    path: Path
    is_new: bool
    lock: StoreLock


@contextmanager
def lock_store_dir(
    root: Path,
    fingerprint: StoreFingerprint,
    owner: str,
    node: int = 0,
    shares: str | None = None,
    parts: Mapping[str, str] | None = None,
) -> Iterator[StoreDir]:
    """Locks ``<root>/<model>-<digest>/node<node>/<split>``, making it if needed; one process of a node does it for all.

    The kernel releases the lock when the process ends, however it ends. Forked processes that outlive a killed one keep
    its lock, because they may still write.

    Args:
        root: Directory of all stores; made if it does not exist.
        fingerprint: Of the features that the store holds or will hold.
        owner: Name by which another user recognizes the holder: the run folder.
        node: Index within the run; nodes that share a disk each have their own store.
        shares: The features in words, of a run that writes no more once they are stored: it shares a store that others
            only read. ``None``: it may write to its end, and shares none.
        parts: All that the samples depend on, by name, for those who ask later what has changed.

    Yields:
        The directory, locked until the context ends.

    Raises:
        StaleStore: The directory exists and does not say that it holds these features.
        StoreInUse: Another process has locked it.
        Unwritable: The directory cannot be made or written.
    """
    path = _path(root, fingerprint, node)
    with ExitStack() as locked:
        try:
            _check_inside(root, path)
            path.mkdir(parents=True, exist_ok=True)
            for entry in path.iterdir():
                _check_inside(path, entry)
            holder = Holder.here(owner, KEEPS if shares is None else FILLS, shares or "")
            lock = locked.enter_context(_locked(path, holder, parts))
            store_dir = StoreDir(path, _claim(path, fingerprint), lock)
        except OSError as error:
            raise unwritable(path, error) from error
        yield store_dir


def other_stores(
    root: Path, fingerprint: StoreFingerprint, node: int = 0, parts: Mapping[str, str] | None = None
) -> list[str]:
    """Lists the other stores of this node that may hold the same samples, each by its name and how it differs.

    Stores of other samples count where they are of the same dataset and model.
    """
    own = _path(root, fingerprint, node)
    found = sorted(path.parent for path in root.glob(f"*/{own.parent.name}/{own.name}/{IDENTITY}"))
    differences = {path: _difference(path, fingerprint) for path in found if path != own}
    named = {path: _named(path, how, parts or {}) for path, how in differences.items()}
    return [f"{path.relative_to(root)} {how}" for path, how in named.items() if how]


def _named(path: Path, difference: str, parts: Mapping[str, str]) -> str:
    """Describes a difference by the names that a user knows; empty for samples of another dataset or model."""
    about = read_about(path)
    known = about.parts if about is not None else {}
    if OTHER_SAMPLES not in difference:
        return difference
    if not parts or origin(known) != origin(parts):
        return ""
    return f"is stale: {', '.join(changed_parts(known, parts)) or UNNAMED}"


def _path(root: Path, fingerprint: StoreFingerprint, node: int) -> Path:
    model = _slug(fingerprint.model.split()[0] if fingerprint.model.split() else "model")
    return root / f"{model}-{fingerprint.digest()}" / f"node{node}" / _slug(fingerprint.split_name)


def _check_inside(folder: Path, path: Path) -> None:
    """Raises StaleStore where symbolic links lead a path out of its folder, which may itself be one."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise _stale(path, f"leads to {path.resolve()} by a symbolic link, out of {folder}")


def _slug(name: str) -> str:
    """Makes a name fit for a directory on any disk."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).lstrip(".")[-NAME_LENGTH:] or "_"


@contextmanager
def _locked(path: Path, holder: Holder, parts: Mapping[str, str] | None) -> Iterator[StoreLock]:
    lock = StoreLock(path, holder, parts)
    try:
        lock.take()
    except BaseException:
        lock.close()
        raise
    try:
        yield lock
    finally:
        lock.release()


def _claim(path: Path, fingerprint: StoreFingerprint) -> bool:
    """Writes the fingerprint into an empty directory, or compares it with the one that is there.

    Returns:
        True if the directory was empty.

    Raises:
        StaleStore: It holds anything else.
    """
    held = sorted({entry.name for entry in path.iterdir()} - {LOCK, GATE, UNFINISHED, ABOUT, UNFINISHED_ABOUT})
    if not held:
        (path / UNFINISHED).write_text(fingerprint.to_json(), encoding="utf-8")
        (path / UNFINISHED).replace(path / IDENTITY)  # atomic: a reader sees all of it or nothing
        return True
    if IDENTITY not in held:
        raise _stale(path, f"has no {IDENTITY} and holds {len(held)} other entries, the first is {held[0]}")
    if difference := _difference(path, fingerprint):
        raise _stale(path, difference)
    return False


def _stale(path: Path, reason: str) -> StaleStore:
    return StaleStore(f"{path} {reason}; its features are not read: delete it, or take another `path`")


def _difference(path: Path, fingerprint: StoreFingerprint) -> str:
    """Describes how a store differs from the fingerprint; empty if it does not."""
    try:
        found = StoreFingerprint.from_json((path / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"has an {IDENTITY} that cannot be read ({error})"
    difference = fingerprint.explain_difference(found)
    return f"differs in {difference}" if difference else ""

"""The stores of ``cache.path=``, which outlive a run: locks them, and waits for a run that fills them.

What happens to a run that finds a store locked::

    the other run ...                              this run ...
    fills it with the features that this one wants waits, then reads it with the other one
    reads it, and writes no more                   reads it with the other one
    fills it with others, or may write to its end  keeps its own for this run only

Only a run whose frozen prefix stays (freeze=prefix) shares a store, since any other may store a higher level.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.persistent import lock_store_dir, other_stores
from pipetransformer.autocache.store_lock import FILLS, StoreLock, holders
from pipetransformer.config.names import in_options
from pipetransformer.config.schema import Config
from pipetransformer.errors import StaleStore, StoreInUse, Unwritable
from pipetransformer.report.reporter import Reporter
from pipetransformer.training.cache_world import WorldCommunicator
from pipetransformer.training.store_parts import named_parts
from pipetransformer.training.world import LocalRank

POLL_S = 0.5  # between two looks at a store that another run fills


@dataclass
class KeptStores:
    """The locked stores of a run.

    Attributes:
        folders: By split; none where the run keeps its own.
        locks: Of each split, in local rank 0 of a node.
        notes: Messages for the user.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    locks: dict[str, StoreLock] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Refusal:
    """Why a store cannot be had now.

    Attributes:
        message: For the user.
        filled_by: The run that fills it with the features that this one wants; empty: it is no use to wait.
    """

    message: str
    filled_by: str = ""


def lock_stores(
    config: Config, fingerprints: Iterable[StoreFingerprint], run_dir: Path, closing: ExitStack,
    communicator: WorldCommunicator, report: Reporter | None = None, tokenizer: Any = None,
) -> KeptStores:  # fmt: skip
    """Locks the stores of all splits, in local rank 0 of each node for all of its ranks. Collective.

    Args:
        config: Of the run.
        fingerprints: Of the features of each split.
        run_dir: Name of this run.
        closing: Gives the locks back.
        communicator: The ranks.
        report: Is told of a wait.
        tokenizer: Of the model, to name it where another one makes a store stale.

    Returns:
        The stores; none, with a note, where one of them cannot be had.
    """
    attempt, is_told = _Attempt(config, fingerprints, run_dir, communicator.local_rank == 0, tokenizer), False
    while True:
        with ExitStack() as held:
            kept, refusal = attempt.make(held)
            refusal = communicator.first_not_none(refusal)
            if refusal is None:
                closing.enter_context(held.pop_all())
                kept.folders = communicator.broadcast_from_local_leader(kept.folders)
                _tell_shared(kept, report)
                return kept
        if not refusal.filled_by:
            return KeptStores(notes=[f"the cache is kept for this run only: {refusal.message}"])
        if not is_told and report is not None:
            report.write("phase", message=f"waits for the store that {refusal.filled_by} fills")
            is_told = True
        _pause()


def _pause() -> None:
    """Sleeps; a signal ends it, as anything before the first step."""
    time.sleep(POLL_S)


class _Attempt:
    """Locks the stores of this node, in local rank 0; the other ranks have nothing to lock."""

    def __init__(
        self, config: Config, fingerprints: Iterable[StoreFingerprint], run_dir: Path, is_leader: bool, tokenizer: Any
    ) -> None:
        self._tokenizer, self._parts = tokenizer, dict[str, str]()
        self._config, self._run_dir, self._is_leader = config, run_dir, is_leader
        self._fingerprints, self._wanted = fingerprints, list[StoreFingerprint]()
        self._end = time.monotonic() + (0 if config.dry_run else config.cache.wait_s)

    def make(self, held: ExitStack) -> tuple[KeptStores, _Refusal | None]:
        """Locks all stores, or returns why one of them cannot be had."""
        kept, shares = KeptStores(), stored_features(self._config)
        try:
            if self._is_leader:
                self._lock(kept, shares, held)
        except StoreInUse as error:
            message, late = in_options(error), f" (it was not filled within cache.wait_s={self._config.cache.wait_s:g})"
            filled_by = next((name for name, use, what in error.holders if use == FILLS and what == shares), "")
            is_late = bool(filled_by) and time.monotonic() > self._end
            return kept, _Refusal(message + late * is_late, filled_by * (not is_late))
        except (StaleStore, Unwritable) as error:
            return kept, _Refusal(in_options(error))
        return kept, None

    def _lock(self, kept: KeptStores, shares: str | None, held: ExitStack) -> None:
        assert self._config.cache.path is not None
        root, node = Path(self._config.cache.path), LocalRank.here().index
        self._wanted = self._wanted or sorted(self._fingerprints, key=lambda one: one.split_name)  # all in one order
        self._parts = self._parts or named_parts(self._config, self._tokenizer)
        for one in self._wanted:
            store_dir = held.enter_context(lock_store_dir(root, one, str(self._run_dir), node, shares, self._parts))
            kept.folders[one.split_name], kept.locks[one.split_name] = store_dir.path, store_dir.lock
            if store_dir.is_new:
                kept.notes += _unused(root, other_stores(root, one, node, self._parts))


def stored_features(config: Config) -> str | None:
    """Describes the features of a run that stores one level and then only reads; ``None`` for any other run."""
    if not config.freeze.is_static:
        return None
    is_drawn = not config.model.pretrained or type(config.peft).__name__ != "NoAdapters"
    weights = f" with the weights of seed={config.seed}" if is_drawn else ""
    return f"the output of block {config.freeze.frozen_at_start} of {config.model.name}{weights}"


def _tell_shared(kept: KeptStores, report: Reporter | None) -> None:
    """Tells who reads a store beside this run."""
    shared = next((lock for lock in kept.locks.values() if lock.is_shared), None)
    if shared is not None and report is not None:
        others = [str(one) for one in holders(shared.path)][:-1]  # this run has written its name last
        names = ", ".join(others) or "another run"
        report.write("phase", message=f"shares the store {shared.path} with {names}")


def _unused(root: Path, found: Sequence[str]) -> list[str]:
    """Explains to a user who expects stored features why there are none."""
    if not found:
        return []
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return [f"cache.path={root} has other features of this data, which are not used: {found[0]}{more}"]

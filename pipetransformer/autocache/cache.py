"""AutoCache: the frozen prefix's output by sample, advanced from level to level."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.about import ABOUT, About, changed_parts, read_about
from pipetransformer.autocache.capacity import CacheCapacity
from pipetransformer.autocache.communicator import Communicator
from pipetransformer.autocache.fill import ShardSlice, batches, incomplete, wanted_shards
from pipetransformer.autocache.fingerprint import level_key
from pipetransformer.autocache.reader import FeatureReader
from pipetransformer.autocache.source import Compute, SampleSource
from pipetransformer.autocache.store import FeatureStore, StoreSpec
from pipetransformer.autocache.store_lock import StoreLock, in_use
from pipetransformer.errors import FeatureOverflow, FillFailed, LoopLeft, StoreFailed, StoreInUse, UserError

Wanted = list[tuple[SampleSource, np.ndarray]]


@dataclass(frozen=True)
class Opened:
    """Samples of an earlier run in the stores that were opened, over all nodes.

    Attributes:
        num_intact: Intact samples found on disk, under any key.
        num_damaged: Samples whose bytes were damaged; they count as missing.
    """

    num_intact: int = 0
    num_damaged: int = 0


@dataclass(frozen=True)
class Filled:
    """Samples of a fill, over all nodes.

    Attributes:
        num_computed: Samples that were computed and stored.
        num_found: Samples that an earlier run had stored under the same key.
        num_replaced: Intact samples of an earlier run that this run's first fill has no use for, and overwrites.
    """

    num_computed: int
    num_found: int
    num_replaced: int = 0


class AutoCache:
    """One level of features for each split. A higher level is computed from the one before, and overwrites it.

    Nothing is allocated before :meth:`open`. All ranks of the run make the same calls; only reading is not collective.

    Args:
        capacity: Budgets and layout of the stores.
        folders: Folder of each split's file.
        communicator: The ranks that share the stores.
        locks: Of persistent stores by split, in local rank 0 of a node; none elsewhere.

    Attributes:
        level: Block whose output is stored; 0 for none.
        reader: Reads the stored level.
    """

    def __init__(
        self, capacity: CacheCapacity, folders: Mapping[str, Path], communicator: Communicator,
        locks: Mapping[str, StoreLock] | None = None,
    ) -> None:  # fmt: skip
        self.capacity, self.folders, self._communicator, self._locks = (
            capacity,
            dict(folders),
            communicator,
            locks or {},
        )
        self._stores: dict[str, FeatureStore] = {}
        self._shared: frozenset[str] = frozenset()  # splits whose files other runs read, on any node
        self._num_damaged = 0
        self.changed: list[str] = []  # parts by which the samples of replaced features differ, as far as known
        self.reader = FeatureReader()
        self._may_be_read = False  # by some rank, at the present level
        self._key, self._num_keys = 0, 0
        self._num_unclaimed = 0  # intact samples of an earlier run, until the first fill
        self.level = 0

    def open(self) -> Opened:
        """Opens the stores, unless they are open. Collective.

        Raises:
            StoreFailed: A node cannot open them; raised on every rank, with one reason. Nothing is left open.
        """
        if self._stores:
            return Opened()
        self._note_shared()
        problem, own = self._open_stores()
        problem = self._communicator.first_not_none(problem)
        opened = Opened(*self._communicator.all_reduce_sum(own.num_intact, own.num_damaged))
        if problem is not None:
            self.close()
            raise StoreFailed(problem)
        self._num_unclaimed, self._num_damaged = opened.num_intact, opened.num_damaged
        return opened

    def _note_shared(self) -> None:
        """Tells all ranks which files other runs may read. Collective where stores are persistent."""
        if self.capacity.persistent:
            own = (name in self._locks and self._locks[name].is_shared for name in self.folders)
            counts = self._communicator.all_reduce_sum(*map(int, own))
            self._shared = frozenset(name for name, count in zip(self.folders, counts, strict=True) if count)

    def _open_stores(self) -> tuple[str | None, Opened]:
        """Opens the stores on local rank 0 of each node, and attaches the other ranks to them."""
        specs: dict[str, StoreSpec] | None = None
        problem, opened = None, Opened()
        if self._communicator.local_rank == 0:
            try:
                self._stores, num_damaged = self.capacity.open_stores(self.folders, self._shared)
                opened = Opened(sum(store.num_stored for store in self._stores.values()), num_damaged)
                specs = {name: store.spec for name, store in self._stores.items()}
            except (OSError, ValueError) as error:
                problem = describe_os_error(error)
        specs = self._communicator.broadcast_from_local_leader(specs)
        if self._communicator.local_rank > 0 and specs is not None:
            try:
                for name, spec in specs.items():
                    self._stores[name] = FeatureStore.attach(spec)
            except (OSError, ValueError) as error:
                problem = describe_os_error(error)
        return problem, opened

    def advance(
        self, level: int, wanted: Wanted, compute: Compute, layers: Iterator[Mapping[str, Tensor]] | None = None,
        stops: Callable[[], bool] = lambda: False, announce: Callable[[Filled], None] | None = None,
    ) -> Filled:  # fmt: skip
        """Stores the output of block ``level`` for the wanted samples, as far as the capacity allows. Collective.

        The ranks of a node divide the work. Each shard's new features overwrite its old ones, so that there is never
        more than one level.

        Args:
            level: Above the present level.
            wanted: Sources and the numbers of their samples.
            compute: Runs the newly frozen layers, those above the present level, without gradient.
            layers: Their weights, for a key by which a later run finds the features; ``None`` where none shall.
            stops: Returns whether this rank asks all to leave the fill.
            announce: Is told what the fill is about to do, on every rank.

        Raises:
            StoreInUse: Other runs read a store, which lacks some of the features and cannot take them.
            FillFailed: On every rank alike; the level before may be lost.
            LoopLeft: The same, where a rank asked for it.
        """
        assert level > self.level, f"the cache is at level {self.level} and cannot advance to {level}"
        self.reader.stop_prefetching()
        self._num_keys += 1
        key = self._num_keys if layers is None else level_key(self._key, self._with_origin(layers))
        if self._may_be_read:
            self._communicator.all_reduce_sum(0)  # barrier: all readers finish before any rank overwrites
        if self._shared or announce is not None:
            coming = self._look_ahead(wanted, key)
            if announce is not None:
                announce(coming)
        self._note_changes()
        num_computed, num_found = self._fill(self._own_batches(wanted), compute, key, stops)
        self._describe(level, key, num_computed)
        self.level, self._key, self._may_be_read = level, key, False
        num_replaced, self._num_unclaimed = 0 if num_found else self._num_unclaimed, 0
        return Filled(num_computed, num_found, num_replaced)

    def _note_changes(self) -> None:
        """Remembers by which parts earlier features in these stores differ."""
        abouts = ((read_about(lock.path), lock.parts) for lock in self._locks.values())
        known = [(about.parts, parts) for about, parts in abouts if about is not None]
        changes = [each for before, parts in known for each in changed_parts(before, parts)]
        self.changed = list(dict.fromkeys(changes))

    def _describe(self, level: int, key: int, num_computed: int) -> None:
        """Writes beside each store what it holds now, for people."""
        for name, lock in self._locks.items():
            store, is_known = self._stores[name], (lock.path / ABOUT).is_file()
            if not lock.is_shared and (num_computed or not is_known):
                about = About(
                    owner=lock.owner, made=time.time(), level=level, key=f"{key:016x}", num_stored=store.num_stored,
                    num_samples=len(store.spec.lengths), parts=lock.parts,
                )  # fmt: skip
                with suppress(OSError):  # a disk that is full or gone costs the description alone
                    about.write(lock.path)

    def _look_ahead(self, wanted: Wanted, key: int) -> Filled:
        """Returns what a fill would do, over all nodes; claims shared stores that it would write to. Collective."""
        num_computed, num_found, num_lacking = self._communicator.all_reduce_sum(*self._count(wanted, key))
        if self._shared and num_lacking + self._num_damaged:
            self._claim()
            return self._look_ahead(wanted, key)
        return Filled(num_computed, num_found, 0 if num_found else self._num_unclaimed)

    def _count(self, wanted: Wanted, key: int) -> tuple[int, int, int]:
        """Counts this rank's samples that have to be computed, those that are found, and those that files lack."""
        num_wanted = num_missing = num_lacking = 0
        for batch in self._own_batches(wanted):
            missing = incomplete(batch, key)
            lacking = [one for one in missing if one.source.name in self._shared and one.store.is_on_disk(one.shard)]
            num_wanted += sum(len(one.ids) for one in batch)
            num_missing += sum(len(one.ids) for one in missing)
            num_lacking += sum(len(one.ids) for one in lacking)
        return num_missing, num_wanted - num_missing, num_lacking

    def _claim(self) -> None:
        """Opens shared stores again to write to them. Collective.

        Raises:
            StoreInUse: Other runs read one of them, on some node; raised on every rank.
        """
        assert not self.level, "a run that shares its stores has one level"
        problem: str | None = None
        for lock in self._locks.values():
            if problem is None and lock.is_shared:
                problem = self._problem_of(lock, lock.claim)
        problem = self._communicator.first_not_none(problem)
        if problem is not None:
            raise StoreInUse(problem)
        self._close_stores()
        self.open()

    @property
    def folder(self) -> Path:
        """Folder of the files of all splits."""
        folder = next(iter(self.folders.values()))
        return folder.parents[2] if self.capacity.persistent else folder

    @staticmethod
    def _problem_of(lock: StoreLock, change: Callable[[], bool]) -> str | None:
        try:
            return None if change() else in_use(lock.path).message
        except (StoreInUse, OSError) as error:  # other ranks still enter the next collective
            return describe_os_error(error)

    def share(self) -> str | None:
        """Writes no more to persistent stores, and lets other runs read them from here on. Collective.

        Returns:
            Why that failed, on every rank alike, or ``None``.
        """
        mine = (lock for lock in self._locks.values() if not lock.is_shared)
        problems = [self._problem_of(lock, lock.share) for lock in mine]
        self._note_shared()
        return self._communicator.first_not_none(next(filter(None, problems), None))

    def keep_for_this_run(self, folder: Path) -> None:
        """Gives persistent stores back, and takes others in their place that end with the run. Collective."""
        self.close()
        self._locks, self._shared, self._num_damaged = {}, frozenset(), 0
        self.capacity = self.capacity.for_this_run()
        self.folders = dict.fromkeys(self.folders, folder)

    def _fill(
        self, own_batches: list[list[ShardSlice]], compute: Compute, key: int, stops: Callable[[], bool]
    ) -> tuple[int, int]:
        """Returns the samples computed and found, over all nodes."""
        num_computed, num_found, problem, is_left = 0, 0, None, False
        try:
            for batch in own_batches:
                if is_left := stops():
                    break
                missing = incomplete(batch, key)
                if missing:
                    self._compute_and_store(missing, compute, key)
                num_missing = sum(len(one.ids) for one in missing)
                num_computed += num_missing
                num_found += sum(len(one.ids) for one in batch) - num_missing
        except (StoreFailed, FeatureOverflow) as error:  # other ranks still enter the collective below
            problem = describe_os_error(error)
        num_computed, num_found, num_failed, num_left = self._communicator.all_reduce_sum(
            num_computed, num_found, problem is not None, is_left
        )
        if num_left:
            raise LoopLeft
        if num_failed:
            raise FillFailed(self._communicator.first_not_none(problem))
        return num_computed, num_found

    def _own_batches(self, wanted: Wanted) -> list[list[ShardSlice]]:
        """Returns this rank's part of the batches of its node."""
        slices = (one for source, ids in wanted for one in wanted_shards(source, self._stores[source.name], ids))
        rank, size = self._communicator.local_rank, self._communicator.local_world_size
        return list(batches(slices, size))[rank::size]

    def _with_origin(self, layers: Iterable[Mapping[str, Tensor]]) -> Iterable[Mapping[str, Tensor]]:
        """Adds the present level to the key of rounded features: the rounding depends on the levels in between."""
        if self.capacity.feature_format.storage == "exact":
            return layers
        return chain([{"from_level": torch.tensor(self.level)}], layers)

    def _compute_and_store(self, batch: list[ShardSlice], compute: Compute, key: int) -> None:
        ids, num_tokens = np.concatenate([one.ids for one in batch]), max(one.num_tokens for one in batch)
        source, store = batch[0].source, batch[0].store
        if self.level:
            inputs, found = store.read(ids, num_tokens, self._key)  # (B, T, D)
            assert bool(found.all()), "what is still wanted was wanted at the level before"
        else:
            inputs = source.inputs(ids, num_tokens)
        features = compute(inputs, source.context(ids, num_tokens))
        store.write_all([(one.shard, one.ids) for one in batch], features, key)

    def start_reading(self, compute: Compute | None) -> None:
        """Reads the present level from here on.

        Args:
            compute: Runs the frozen layers on the input of samples that are not stored; ``None`` where all are.
        """
        self._may_be_read = True
        self.reader.start(self._stores, self._key, compute)

    def drop_page_cache(self) -> None:
        """Evicts the disk tier from the page cache, to measure reads that come from the disk."""
        for store in self._stores.values():
            store.drop_page_cache()

    def clear(self) -> None:
        """Goes back to level 0, because blocks below the level change. The stores stay open."""
        self.reader.start({}, 0, None)
        self.level, self._key = 0, 0

    def close(self) -> None:
        """Closes the stores in this process, and gives them back to other runs."""
        self._close_stores()
        for lock in self._locks.values():
            lock.release()

    def _close_stores(self) -> None:
        self.clear()
        for store in self._stores.values():
            store.close()
        self._stores = {}


def describe_os_error(error: Exception) -> str:
    """Returns the error message without its errno; the fields of a user's error stay in backticks."""
    if isinstance(error, UserError):
        return error.message
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror + (f": {error.filename}" if error.filename else "")

"""AutoCache: the frozen prefix's output by sample, advanced from level to level."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.capacity import CacheCapacity
from pipetransformer.autocache.communicator import Communicator
from pipetransformer.autocache.fill import ShardSlice, batches, missing_of, wanted_shards
from pipetransformer.autocache.fingerprint import level_key
from pipetransformer.autocache.reader import FeatureReader, ReadStats, Request
from pipetransformer.autocache.source import Compute, SampleSource
from pipetransformer.autocache.store import FeatureStore
from pipetransformer.autocache.store_spec import StoreSpec
from pipetransformer.errors import FeatureOverflow, FillFailed, StoreFailed, UserError

Wanted = list[tuple[SampleSource, np.ndarray]]


@dataclass(frozen=True)
class Filled:
    """Samples over all nodes: computed, and found in a store of an earlier run."""

    num_computed: int
    num_found: int


class AutoCache:
    """One level of features for each split. A higher level is computed from the one before, and takes its place.

    Nothing is allocated before :meth:`open`. All processes of the run make the same calls, but for reading.

    Args:
        capacity: What the stores may take.
        folders: Where the files of each split lie.
        communicator: The processes that share the stores.

    Attributes:
        level: The block whose output is stored; at 0 nothing is.
        reads: What this process read, at all levels.
        fill_s: Seconds of storing, at all levels.
        num_dropped: Samples of an earlier run whose bytes were damaged, over all nodes.
        num_kept: Those that are whole, of whatever weights and level, until the first level of this run is stored.
    """

    def __init__(self, capacity: CacheCapacity, folders: Mapping[str, Path], communicator: Communicator) -> None:
        self.capacity, self._folders, self._communicator = capacity, folders, communicator
        self._stores: dict[str, FeatureStore] = {}
        self._reader: FeatureReader | None = None
        self._was_served = False
        self._key, self._num_keys = 0, 0
        self.level, self.reads, self.fill_s = 0, ReadStats(), 0.0
        self.num_dropped = self.num_kept = 0

    def open(self) -> str | None:
        """Takes the room, once.

        Returns:
            Why there is none, on every process alike; then nothing can be stored in this run.
        """
        problem = None
        if not self._stores:
            problem = self._communicator.first_not_none(self._take_room())
            if problem is not None:
                self.close()
            self.num_dropped, self.num_kept = self._communicator.all_reduce_sum(self.num_dropped, self.num_kept)
        return problem

    def _take_room(self) -> str | None:
        """Worker 0 of a node makes the stores, and the others join."""
        descriptions: dict[str, StoreSpec] | None = None
        problem = None
        if self._communicator.local_rank == 0:
            try:
                self._stores, self.num_dropped = self.capacity.make(self._folders)
                self.num_kept = sum(store.num_stored for store in self._stores.values())
                descriptions = {name: store.description for name, store in self._stores.items()}
            except (OSError, ValueError) as error:
                problem = describe_os_error(error)
        descriptions = self._communicator.broadcast_from_local_leader(descriptions)
        if self._communicator.local_rank > 0 and descriptions is not None:
            try:
                for name, each in descriptions.items():
                    self._stores[name] = FeatureStore.attach(each)
            except (OSError, ValueError) as error:
                problem = describe_os_error(error)
        return problem

    def advance(
        self, level: int, wanted: Wanted, compute: Compute, layers: Iterator[Mapping[str, Tensor]] | None = None
    ) -> Filled:
        """Stores the output of block ``level`` for the wanted samples of each split, as far as there is room.

        The processes of a node share the work. A shard's old features are overwritten by its new ones, so that there
        is never more than one level.

        Args:
            compute: Runs the newly frozen layers, those above the present level, without gradient.
            layers: Their weights, for a key by which a later run knows them again; ``None`` where none shall.

        Raises:
            FillFailed: On every process alike.
        """
        assert level > self.level, f"the cache is at level {self.level} and cannot advance to {level}"
        start = time.perf_counter()
        self.stop_reading()
        self._num_keys += 1
        key = self._num_keys if layers is None else level_key(self._key, self._marked(layers))
        if self._was_served:
            self._communicator.all_reduce_sum(0)  # nobody writes before everybody has done reading
        filled = self._fill(self._own_groups(wanted), compute, key)
        self.level, self._key, self._was_served = level, key, False
        self.fill_s += time.perf_counter() - start
        return filled

    def _fill(self, groups: list[list[ShardSlice]], compute: Compute, key: int) -> Filled:
        num_computed, num_found, problem = 0, 0, None
        try:
            for group in groups:
                missing = missing_of(group, key)
                if missing:
                    self._store(missing, compute, key)
                num_missing = sum(len(part.ids) for part in missing)
                num_computed += num_missing
                num_found += sum(len(part.ids) for part in group) - num_missing
        except (StoreFailed, FeatureOverflow) as error:  # the others come to the meeting
            problem = describe_os_error(error)
        num_computed, num_found, num_failed = self._communicator.all_reduce_sum(
            num_computed, num_found, problem is not None
        )
        if num_failed:
            raise FillFailed(self._communicator.first_not_none(problem))
        return Filled(num_computed, num_found)

    def _own_groups(self, wanted: Wanted) -> list[list[ShardSlice]]:
        """What this worker computes; the workers of a node share the groups out."""
        parts = (part for source, ids in wanted for part in wanted_shards(source, self._stores[source.name], ids))
        return list(batches(parts, self._communicator.local_world_size))[
            self._communicator.local_rank :: self._communicator.local_world_size
        ]

    def _marked(self, layers: Iterable[Mapping[str, Tensor]]) -> Iterable[Mapping[str, Tensor]]:
        """With what is stored rounded, what is computed from it depends on the level that it was taken from."""
        if self.capacity.kind.storage == "exact":
            return layers
        return chain([{"from_level": torch.tensor(self.level)}], layers)

    def _store(self, group: list[ShardSlice], compute: Compute, key: int) -> None:
        """Computes the samples of neighbouring shards at once."""
        ids, num_tokens = np.concatenate([part.ids for part in group]), max(part.num_tokens for part in group)
        source, store = group[0].source, group[0].store
        if self.level:
            inputs, found = store.read(ids, num_tokens, self._key)
            assert bool(found.all()), "what is still wanted was wanted at the level before"
        else:
            inputs = source.inputs(ids, num_tokens)
        features = compute(inputs, source.context(ids, num_tokens))
        store.write_all([(part.shard, part.ids) for part in group], features, key)

    def serve(self, compute: Compute | None) -> None:
        """From here on reads the present level.

        Args:
            compute: Runs the frozen layers on the input of samples for which there is no room; ``None`` where there
                is room for all.
        """
        self.stop_reading()
        self._was_served = True
        self._reader = FeatureReader(self._stores, self._key, compute, self.reads)

    def prefetch(self, requests: Iterator[Request]) -> None:
        """Reads ahead what will be asked for."""
        assert self._reader is not None
        self._reader.prefetch(requests)

    def read(self, request: Request) -> Tensor:
        """Features (B, num_tokens, D) of the present level; valid until a few reads later."""
        assert self._reader is not None, "nothing is stored"
        return self._reader.read(request)

    def stop_reading(self) -> None:
        """Ends reading ahead."""
        if self._reader is not None:
            self._reader.stop()

    def forget(self) -> None:
        """Has the next reads of the disk tier come from the disk, to measure them."""
        for store in self._stores.values():
            store.forget()

    def clear(self) -> None:
        """Goes back to level 0, because blocks below the level change; the room stays."""
        self.stop_reading()
        self._reader, self.level, self._key = None, 0, 0

    def close(self) -> None:
        """Gives the room back."""
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

"""The capacity of a node: how much of each split fits, in which tier, and the stores themselves."""

import errno
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipetransformer.autocache.codec import Codec, codec
from pipetransformer.autocache.layout import Budgets, StoreLayout, assign_tiers, bytes_needed, split_budget
from pipetransformer.autocache.source import SampleSource
from pipetransformer.autocache.store import FeatureStore, StoreSpec
from pipetransformer.errors import StoreFailed

SHARD_SIZE = 32  # samples that are computed, written and verified together
SEED = 0  # of the order in which samples fill the tiers


@dataclass(frozen=True)
class FeatureFormat:
    """Width and type of a feature, and the name of the codec that stores it (see :func:`codec`)."""

    hidden_size: int
    dtype: torch.dtype
    storage: str = "exact"

    def codec(self) -> Codec:
        """Makes the codec."""
        return codec(self.storage, self.hidden_size, self.dtype)


class CacheCapacity:
    """Divides a node's budgets among the splits. Nothing is allocated before :meth:`open_stores`.

    Args:
        sources: The splits.
        feature_format: Of the features.
        budgets: Of the node, for all splits together.
        persistent: The files outlive the run.

    Attributes:
        whole_bytes: Bytes of all samples of all splits.
        budgets: Of each split, by name.
    """

    def __init__(
        self, sources: Sequence[SampleSource], feature_format: FeatureFormat, budgets: Budgets, persistent: bool
    ) -> None:
        self.feature_format, self.persistent = feature_format, persistent
        self._given = sources, feature_format, budgets
        row_bytes = feature_format.codec().row_bytes
        self._sources = {source.name: source for source in sources}
        needed = [bytes_needed(source.lengths, row_bytes, SHARD_SIZE) for source in sources]
        self.whole_bytes = sum(needed)
        memory = split_budget(budgets.memory_bytes, needed)
        # a split that memory holds whole needs no disk, unless it shall outlive the run
        on_disk = [0 if own == whole and not persistent else whole for own, whole in zip(memory, needed, strict=True)]
        disk = split_budget(budgets.disk_bytes, on_disk)
        self.budgets = {name: Budgets(*own) for name, *own in zip(self._sources, memory, disk, strict=True)}
        self._layouts = {name: self._layout(source, row_bytes) for name, source in self._sources.items()}

    def _layout(self, source: SampleSource, row_bytes: int) -> StoreLayout:
        budgets, persistent, is_local = self.budgets[source.name], self.persistent, source.is_local
        return assign_tiers(source.lengths, row_bytes, budgets, SHARD_SIZE, SEED, persistent, is_local)

    def for_this_run(self) -> "CacheCapacity":
        """Returns the capacity with the same budgets of stores that end with the run."""
        return CacheCapacity(*self._given, persistent=False)

    def miss_rate(self, name: str) -> float:
        """Returns the fraction of a split's samples that do not fit."""
        return 1 - sum(len(ids) for ids in self._layouts[name].shards) / len(self._sources[name].lengths)

    @property
    def is_partial(self) -> bool:
        """True where a sample of any split does not fit."""
        return any(self.miss_rate(name) > 0 for name in self._layouts)

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of all stores together, once they are open."""
        tiers = [layout.tiers for layout in self._layouts.values()]
        names = dict.fromkeys(name for own in tiers for name in own)
        return {name: sum(own[name].num_bytes for own in tiers if name in own) for name in names}

    def open_stores(
        self, folders: Mapping[str, Path], shared: Collection[str] = ()
    ) -> tuple[dict[str, FeatureStore], int]:
        """Makes the stores in one process of a node, or reopens persistent ones; the other processes attach.

        Args:
            folders: Folder of each split's file.
            shared: Splits whose files other runs read at the same time; nothing in them is changed.

        Returns:
            The stores, and the number of samples of reopened files that were damaged and are invalid now.

        Raises:
            OSError: Memory or disk has less space than the budgets allow, or the folder of a persistent file has been
                removed; nothing is left behind.
            UserError: A persistent file is not what it should be.
        """
        stores: dict[str, FeatureStore] = {}
        created: list[Path] = []
        num_damaged = 0
        try:
            for name in self.budgets:
                spec = self._spec(name, folders[name], name in shared)
                if self.persistent and not folders[name].is_dir():  # a new one would have neither identity nor lock
                    raise StoreFailed(errno.ENOENT, f"{folders[name]} was removed during the run")
                exists = self.persistent and (spec.path.exists() or spec.reads_only)
                stores[name] = FeatureStore.reopen(spec) if exists else FeatureStore.create(spec)
                if not exists:
                    created.append(spec.path)
                else:
                    num_damaged += stores[name].verify()
                    stores[name].promote()
        except (OSError, ValueError):
            for store in stores.values():
                store.close()
            for path in created:  # persistent files with nothing in them
                path.unlink(missing_ok=True)
            raise
        return stores, num_damaged

    def _spec(self, name: str, folder: Path, reads_only: bool) -> StoreSpec:
        return StoreSpec(
            lengths=self._sources[name].lengths,
            hidden_size=self.feature_format.hidden_size,
            dtype=self.feature_format.dtype,
            storage=self.feature_format.storage,
            budgets=self.budgets[name],
            path=folder / f"{name}.features",
            shard_size=SHARD_SIZE,
            seed=SEED,
            persistent=self.persistent,
            is_local=self._sources[name].is_local,
            reads_only=reads_only,
        )

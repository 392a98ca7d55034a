"""The room that a node has for features: how much of each split, in which tier, and the stores in it."""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipetransformer.autocache.codec import Codec, codec
from pipetransformer.autocache.layout import Budgets, bytes_needed, place, split_budget
from pipetransformer.autocache.source import SampleSource
from pipetransformer.autocache.store import FeatureStore
from pipetransformer.autocache.store_spec import StoreSpec
from pipetransformer.errors import StoreFailed

SHARD_SIZE = 32  # samples that are computed, written and checked together
SEED = 0


@dataclass(frozen=True)
class FeatureFormat:
    """What a feature is: its width, its type, and the type that it is stored in (see :func:`codec`)."""

    hidden_size: int
    dtype: torch.dtype
    storage: str = "exact"

    def codec(self) -> Codec:
        return codec(self.storage, self.hidden_size, self.dtype)


class CacheCapacity:
    """Shares a node's budgets among the splits. Nothing is taken before :meth:`make`.

    Args:
        sources: The splits.
        kind: Of the features.
        budgets: Of the node, for all splits together.
        persistent: What lies on disk outlives the run.

    Attributes:
        whole_bytes: What all samples of all splits take.
    """

    def __init__(
        self, sources: Sequence[SampleSource], kind: FeatureFormat, budgets: Budgets, persistent: bool
    ) -> None:
        self.kind, self.persistent = kind, persistent
        row_bytes = kind.codec().row_bytes
        lengths = {source.name: source.lengths for source in sources}
        needed = [bytes_needed(each, row_bytes, SHARD_SIZE) for each in lengths.values()]
        self.whole_bytes = sum(needed)
        memory = split_budget(budgets.memory_bytes, needed)
        beyond = [0 if own == whole and not persistent else whole for own, whole in zip(memory, needed, strict=True)]
        disk = split_budget(budgets.disk_bytes, beyond)
        self.shares = {name: Budgets(*share) for name, *share in zip(lengths, memory, disk, strict=True)}
        self._lengths, self._is_local = lengths, {source.name: source.is_local for source in sources}
        self._placements = {
            name: place(lengths[name], row_bytes, share, SHARD_SIZE, SEED, persistent, self._is_local[name])
            for name, share in self.shares.items()
        }

    def missing(self, name: str) -> float:
        """Share of a split's samples for which there is no room."""
        return 1 - sum(len(ids) for ids in self._placements[name].shards) / len(self._lengths[name])

    @property
    def is_partial(self) -> bool:
        """Whether any sample of any split finds no room."""
        return any(self.missing(name) > 0 for name in self._placements)

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """What the stores take, once made."""
        tiers = [placement.tiers for placement in self._placements.values()]
        names = dict.fromkeys(name for own in tiers for name in own)
        return {name: sum(own[name].num_bytes for own in tiers if name in own) for name in names}

    def make(self, folders: Mapping[str, Path]) -> tuple[dict[str, FeatureStore], int]:
        """Takes the room, in one process of a node; the others attach. A lasting file that is there is opened again.

        Args:
            folders: For the disk tier of each split.

        Returns:
            The stores, and how many samples of a file that was there were damaged and are forgotten.

        Raises:
            OSError: Memory or disk has less room than the budgets allow, or the folder of lasting files has gone;
                nothing is left behind.
            ValueError: A lasting file is not what it should be.
        """
        stores: dict[str, FeatureStore] = {}
        made: list[Path] = []
        num_dropped = 0
        try:
            for name in self.shares:
                description = self._description(name, folders[name])
                if self.persistent and not folders[name].is_dir():  # a new one would have neither identity nor lock
                    raise StoreFailed(errno.ENOENT, f"{folders[name]} was removed while the run lasts")
                found = self.persistent and description.path.exists()
                stores[name] = FeatureStore.reopen(description) if found else FeatureStore.create(description)
                if not found:
                    made.append(description.path)
                else:
                    num_dropped += stores[name].verify()
                    stores[name].promote()
        except (OSError, ValueError):
            for store in stores.values():
                store.close()
            for path in made:  # a lasting file with nothing in it
                path.unlink(missing_ok=True)
            raise
        return stores, num_dropped

    def _description(self, name: str, folder: Path) -> StoreSpec:
        return StoreSpec(
            lengths=self._lengths[name],
            hidden_size=self.kind.hidden_size,
            dtype=self.kind.dtype,
            storage=self.kind.storage,
            budgets=self.shares[name],
            path=folder / f"{name}.features",
            shard_size=SHARD_SIZE,
            seed=SEED,
            lasting=self.persistent,
            is_local=self._is_local[name],
        )

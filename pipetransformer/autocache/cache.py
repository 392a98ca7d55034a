"""AutoCache: the frozen prefix's output by sample, advanced from level to level."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.store import FeatureStore

Read = Callable[[np.ndarray, int], tuple[Tensor, dict[str, Tensor]]]
Compute = Callable[[Tensor, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Source:
    """Samples of one split that can be cached.

    Attributes:
        name: The split's name.
        lengths: Tokens of each sample at the layer boundary, (N,).
        read: ``read(ids, num_tokens)`` gives the model's inputs and context of samples.
    """

    name: str
    lengths: np.ndarray
    read: Read


class AutoCache:
    """One level of features for each split. Filled once per level; a higher level is computed from the one before.

    Args:
        folder: Where the stores lie, one folder per node.
        worker, num_workers: This process's place among those of its node; they share the work.
        barrier: Waits for all processes.
    """

    def __init__(
        self, folder: Path, hidden_size: int, dtype: torch.dtype, worker: int, num_workers: int,
        barrier: Callable[[], object],
    ) -> None:  # fmt: skip
        self._folder, self._hidden_size, self._dtype = folder, hidden_size, dtype
        self._worker, self._num_workers, self._barrier = worker, num_workers, barrier
        self._stores: dict[str, FeatureStore] = {}
        self.level = 0

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for store in self._stores.values())

    def read(self, source: Source, ids: np.ndarray, num_tokens: int) -> Tensor:
        """Features (B, num_tokens, D) of the current level."""
        return self._stores[source.name].read(ids, num_tokens)

    def advance(self, level: int, wanted: list[tuple[Source, np.ndarray]], compute: Compute, batch_size: int) -> int:
        """Stores the output of block ``level`` for the wanted samples of each split, from what the old level holds.

        Every process takes its part of the samples; all must call. The old level is deleted once all are done.

        Args:
            compute: Runs the newly frozen layers, those above the old level, without gradient.
            batch_size: Samples that run at once.

        Returns:
            How many samples were computed, over all processes of the node.
        """
        assert level > self.level, f"the cache is at level {self.level} and cannot advance to {level}"
        stores = {source.name: self._new_store(source, level) for source, _ in wanted}
        self._barrier()  # nobody writes before everybody has the files
        for source, ids in wanted:
            self._fill(stores[source.name], source, ids, compute, batch_size)
        self._barrier()  # nobody reads before everybody has written
        self.delete()
        self._stores, self.level = stores, level
        return sum(len(ids) for _, ids in wanted)

    def _new_store(self, source: Source, level: int) -> FeatureStore:
        path = self._folder / f"{source.name}-level{level}.features"
        return FeatureStore(path, source.lengths, self._hidden_size, self._dtype)

    def _fill(self, store: FeatureStore, source: Source, ids: np.ndarray, compute: Compute, batch_size: int) -> None:
        by_length = ids[np.argsort(source.lengths[ids], kind="stable")]  # similar lengths together: little padding
        mine = by_length[self._worker :: self._num_workers]
        for part in np.array_split(mine, max(1, -(-len(mine) // batch_size))):
            if len(part):
                num_tokens = int(source.lengths[part].max())
                inputs, context = source.read(part, num_tokens)
                if self.level:
                    inputs = self.read(source, part, num_tokens)
                store.write(part, compute(inputs, context))

    def delete(self) -> None:
        """Goes back to level 0. The files are removed by one process of a node."""
        if self._worker == 0:
            for store in self._stores.values():
                store.delete()
        self._stores, self.level = {}, 0

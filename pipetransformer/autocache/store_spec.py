"""What a store is made from, as plain values that the processes of a node send each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from pipetransformer.autocache.codec import codec
from pipetransformer.autocache.layout import Budgets, Placement, place


@dataclass(frozen=True, eq=False)
class StoreSpec:
    """All that a process needs to open a :class:`~pipetransformer.autocache.store.FeatureStore`.

    Attributes:
        lengths: Tokens of each sample, (N,).
        hidden_size: Width of a feature, D.
        dtype: Type of the features.
        storage: Name of the codec.
        budgets: Of this split on this node.
        path: File of the disk tier, if it is lasting; else one without a name lies on the same disk.
        shard_size: Samples that are computed and written together, at most.
        seed: Of the order in which samples fill the tiers.
        lasting: The file outlives the run.
        is_local: Samples that come before the others, bool (N,); none does by default.
        addresses: Of the tiers; filled in when the store is made.
    """

    lengths: np.ndarray
    hidden_size: int
    dtype: torch.dtype
    storage: str
    budgets: Budgets
    path: Path
    shard_size: int
    seed: int
    lasting: bool = False
    is_local: np.ndarray | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)

    def place(self) -> Placement:
        """Which samples lie where; the same in every process."""
        row_bytes = codec(self.storage, self.hidden_size, self.dtype).row_bytes
        return place(self.lengths, row_bytes, self.budgets, self.shard_size, self.seed, self.lasting, self.is_local)

"""Turns sample ids into the batch that a rank needs under its plan."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.cache import AutoCache, Source
from pipetransformer.autodp.sampler import Share, share
from pipetransformer.autodp.topology import Position
from pipetransformer.autopipe.plan import Plan
from pipetransformer.data.base import Split
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.randomness import sample_keys

LENGTH_STEP = 8  # padded lengths are multiples of it, so that few shapes occur


class Feed:
    """Reads one split.

    Args:
        hidden_shape: Maps an input batch to the shape (B, T, D) between layers.
        seed: Of the run; part of every sample's key.
    """

    def __init__(self, split: Split, hidden_shape: Callable[[Tensor], torch.Size], seed: int) -> None:
        self.split, self._seed = split, seed
        first = np.zeros(1, dtype=np.int64)
        _, num_tokens, self.hidden_size = hidden_shape(split.inputs([0], self.padded(first)))
        lengths = np.full(len(split), num_tokens) if split.lengths is None else np.asarray(split.lengths)
        self.source = Source(split.name, lengths, self.read)
        self.cache: AutoCache | None = None

    def read(self, ids: np.ndarray, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Model inputs and context of samples, padded to ``num_tokens`` where lengths differ."""
        padded = None if self.split.lengths is None else num_tokens
        return self.split.inputs(ids.tolist(), padded), self.split.context(ids.tolist(), padded)

    def batch(
        self, global_ids: np.ndarray, plan: Plan, place: Position, step: int = 0, targets: bool = True
    ) -> tuple[Batch, Share]:
        """This rank's share of a global batch; only what its stage reads is loaded."""
        part = share(global_ids, place.replica, plan.num_replicas, plan.num_microbatches)
        ids, padded = part.ids.tolist(), self.padded(global_ids)
        num_tokens = int(self.source.lengths[0]) if padded is None else padded
        is_last = place.device == plan.pipeline_size - 1
        batch = Batch(
            inputs=self._inputs(part.ids, num_tokens, plan) if place.device == 0 else None,
            context=self.split.context(ids, padded),
            targets=self.split.targets(ids) if is_last and targets else None,
            weights=torch.from_numpy(part.weights.astype(np.float64)),
            keys=sample_keys(self._seed, step, part.ids),
            hidden_shape=(len(ids), num_tokens, self.hidden_size),
            num_samples=len(global_ids),
        )
        return batch, part

    def padded(self, global_ids: np.ndarray) -> int | None:
        """Tokens to which a global batch is padded, equal on every rank whatever its share; ``None`` for images."""
        lengths = self.split.lengths
        if lengths is None:
            return None
        longest = int(lengths[global_ids].max())
        return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, int(lengths.max()))

    def _inputs(self, ids: np.ndarray, num_tokens: int, plan: Plan) -> Tensor:
        if plan.cache_level:
            assert self.cache is not None
            return self.cache.read(self.source, ids, num_tokens)
        return self.read(ids, num_tokens)[0]

"""Turns sample ids into the batch that a rank needs under its plan."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autocache.reader import Request
from pipetransformer.autocache.source import SampleSource
from pipetransformer.autodp.sampler import ReplicaBatch, home_nodes, reorder_for_locality, replica_batch
from pipetransformer.autodp.topology import Topology
from pipetransformer.data.base import Split
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.rng import sample_keys
from pipetransformer.training.node import ONE_NODE, NodeLayout

LENGTH_STEP = 8  # padded lengths are multiples of it, so that few shapes occur


class BatchLoader:
    """Reads one split.

    Args:
        hidden_shape: Maps an input batch to the shape (B, T, D) between layers.
        seed: Of the run; part of every sample's key.
        num_draws: Random draws of each sample that the cache keeps, used in turn; one where nothing is random.
        nodes: Of the run. Where a node has no room for all features, samples stay with one node.

    Attributes:
        source: The samples as the cache knows them: draw ``v`` of sample ``i`` is number ``v N + i``.
    """

    def __init__(
        self, split: Split, hidden_shape: Callable[[Tensor], torch.Size], seed: int, num_draws: int = 1,
        nodes: NodeLayout = ONE_NODE,
    ) -> None:  # fmt: skip
        self.split, self._seed, self._num_draws, self._epoch = split, seed, num_draws, 0
        first = np.zeros(1, dtype=np.int64)
        _, num_tokens, self.hidden_size = hidden_shape(split.inputs([0], self.padded(first)))
        lengths = np.full(len(split), num_tokens) if split.lengths is None else np.asarray(split.lengths)
        self._nodes, self._homes = nodes, home_nodes(len(split), nodes.count)
        is_local = np.tile(self._homes == nodes.index, num_draws)
        self.source = SampleSource(split.name, np.tile(lengths, num_draws), self._drawn_inputs, self._context, is_local)
        self.cache: AutoCache | None = None

    def set_epoch(self, epoch: int) -> None:
        """Redraws random transforms."""
        self._epoch = epoch
        self.split.set_epoch(epoch)

    def drawn(self, ids: np.ndarray, epoch: int | None = None) -> np.ndarray:
        """The numbers of samples at the cache in an epoch, by default the present one."""
        return ids + (self._epoch if epoch is None else epoch) % self._num_draws * len(self.split)

    def _drawn_inputs(self, numbers: np.ndarray, num_tokens: int) -> Tensor:
        draws, ids = np.divmod(numbers, len(self.split))
        padded = None if self.split.lengths is None else num_tokens
        by_draw = np.argsort(draws, kind="stable")
        parts = []
        for draw in np.unique(draws):
            self.split.set_epoch(int(draw))
            parts.append(self.split.inputs(ids[draws == draw].tolist(), padded))
        self.split.set_epoch(self._epoch)
        return torch.cat(parts)[np.argsort(by_draw)]

    def _context(self, numbers: np.ndarray, num_tokens: int) -> dict[str, Tensor]:
        ids = (numbers % len(self.split)).tolist()
        return self.split.context(ids, None if self.split.lengths is None else num_tokens)

    def prefetch(self, batches: Iterable[np.ndarray], topology: Topology) -> None:
        """Tells the cache which global batches are read from here on, if this rank reads it under the plan."""
        if topology.plan.cache_level and topology.is_first:
            assert self.cache is not None
            self.cache.prefetch(self._request(ids, topology) for ids in batches)

    def _request(self, global_ids: np.ndarray, topology: Topology) -> Request:
        part = self._replica_batch(global_ids, topology)
        return Request(self.source, self.drawn(part.ids), self._num_tokens(global_ids))

    def _replica_batch(self, global_ids: np.ndarray, topology: Topology) -> ReplicaBatch:
        plan = topology.plan
        if plan.cache_level and self._nodes.count > 1 and self.cache is not None and self.cache.capacity.is_partial:
            nodes = [self._nodes.of_rank(rank) for rank in topology.reading_ranks]
            global_ids = reorder_for_locality(global_ids, self._homes[global_ids], nodes)
        return replica_batch(global_ids, topology.replica, plan.num_replicas, plan.num_microbatches)

    def _num_tokens(self, global_ids: np.ndarray) -> int:
        return self.padded(global_ids) or int(self.source.lengths[0])

    def batch(self, ids: np.ndarray, topology: Topology, step: int = 0, targets: bool = True) -> Batch:
        """Loads this rank's part of a global batch; only what its stages read.

        Args:
            ids: Sample ids of the global batch, the same on every rank.
            topology: This rank's view of the plan; not of an idle rank.
            step: The optimizer step, for the samples' random streams.
            targets: Loads the labels on the last stage.
        """
        part = self._replica_batch(ids, topology)
        own, padded, num_tokens = part.ids.tolist(), self.padded(ids), self._num_tokens(ids)
        return Batch(
            ids=part.ids,
            inputs=self._inputs(part.ids, num_tokens, topology.plan.cache_level) if topology.is_first else None,
            context=self.split.context(own, padded),
            targets=self.split.targets(own) if topology.is_last and targets else None,
            weights=torch.from_numpy(part.weights.astype(np.float64)),
            keys=sample_keys(self._seed, step, part.ids),
            hidden_shape=(len(own), num_tokens, self.hidden_size),
            global_batch_size=len(ids),
        )

    def padded(self, global_ids: np.ndarray) -> int | None:
        """Tokens to which a global batch is padded, equal on every rank whatever its share; ``None`` for images."""
        lengths = self.split.lengths
        if lengths is None:
            return None
        longest = int(lengths[global_ids].max())
        return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, int(lengths.max()))

    def _inputs(self, ids: np.ndarray, num_tokens: int, cache_level: int) -> Tensor:
        if cache_level:
            assert self.cache is not None
            return self.cache.read(Request(self.source, self.drawn(ids), num_tokens))
        return self.split.inputs(ids.tolist(), None if self.split.lengths is None else num_tokens)

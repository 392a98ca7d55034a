"""Turns sample ids into the batch that a rank needs under its plan."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.reader import FeatureReader, Request
from pipetransformer.autocache.source import SampleSource
from pipetransformer.autodp.sampler import ReplicaBatch, home_nodes, reorder_for_locality, replica_batch
from pipetransformer.autodp.topology import Topology
from pipetransformer.data.base import PARTS, Split
from pipetransformer.data.images.flip_pair import FlipPair
from pipetransformer.data.images.mixing import Mix
from pipetransformer.data.token_tasks import IGNORED
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.rng import sample_keys
from pipetransformer.training.input_reader import InputReader, InputRequest
from pipetransformer.training.packing import PackedRows, packed_rows
from pipetransformer.training.world import ONE_NODE, NodeLayout

LENGTH_STEP = 8  # padded lengths are multiples of it, so that few shapes occur


def sample_source(
    split: Split,
    hidden_shape: Callable[[Tensor], torch.Size],
    num_draws: int = 1,
    nodes: NodeLayout = ONE_NODE,
    pair: FlipPair | None = None,
) -> SampleSource:
    """Describes a split to the cache.

    Args:
        split: The split. The source reads it and changes nothing that other readers see.
        hidden_shape: Maps an input batch to the shape (B, T, D) between layers.
        num_draws: Random draws of each sample that the cache stores.
        nodes: The nodes of the run, which divide the samples that they store first.
        pair: Both pictures of each sample, which are the two draws that are stored.
    """
    first = np.zeros(1, dtype=np.int64)
    _, num_tokens, hidden_size = hidden_shape(split.inputs([0], padded_length(split, first)))
    lengths = np.full(len(split), num_tokens) if split.lengths is None else np.asarray(split.lengths)
    is_local = home_nodes(len(split), nodes.count) == nodes.index  # (N,)

    def inputs(numbers: np.ndarray, num_tokens: int) -> Tensor:
        draws, ids = np.divmod(numbers, len(split))
        order = np.argsort(draws, kind="stable")
        parts = [drawn(ids[draws == draw], num_tokens, int(draw)) for draw in np.unique(draws)]
        return torch.cat(parts)[np.argsort(order)]

    def drawn(ids: np.ndarray, num_tokens: int, draw: int) -> Tensor:
        return _inputs(split, ids, num_tokens, draw) if pair is None else pair.inputs(ids.tolist(), bool(draw))

    def context(numbers: np.ndarray, num_tokens: int) -> dict[str, Tensor]:
        return split.context((numbers % len(split)).tolist(), None if split.lengths is None else num_tokens)

    return SampleSource(
        split.name,
        np.tile(lengths, num_draws),
        hidden_size,
        inputs,
        context,
        num_draws,
        np.tile(is_local, num_draws),
        None if pair is None else pair.draws,
    )


def padded_length(split: Split, global_ids: np.ndarray) -> int | None:
    """Returns the tokens to which a global batch is padded, on every rank alike; ``None`` for images."""
    lengths = split.lengths
    if lengths is None:
        return None
    longest = int(lengths[global_ids].max())
    return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, int(lengths.max()))


def _inputs(split: Split, ids: np.ndarray, num_tokens: int, epoch: int) -> Tensor:
    return split.inputs(ids.tolist(), None if split.lengths is None else num_tokens, epoch)


class ComingBatch(NamedTuple):
    """A global batch that will be asked for: its sample ids (B,), its step and its epoch."""

    ids: np.ndarray
    step: int = 0
    epoch: int = 0


class BatchLoader:
    """Loads one split: from the dataset, or from the cache where the plan has a cache level.

    Args:
        split: The samples.
        source: The same samples as the cache numbers them; see :func:`sample_source`.
        seed: Of the run; part of every sample's random key.
        reader: Reads stored features; ``None`` without a cache.
        nodes: The nodes of the run, if each stores only a part of the features: then batches are reordered so that
            ranks read the samples that their node stores.
        inputs: Reads what is not cached; ``None``: nothing is read ahead.
    """

    def __init__(
        self, split: Split, source: SampleSource, seed: int, reader: FeatureReader | None = None,
        nodes: NodeLayout = ONE_NODE, inputs: InputReader | None = None,
    ) -> None:  # fmt: skip
        self.split, self.source, self._seed, self._reader, self._epoch = split, source, seed, reader, 0
        self._nodes, self._homes = nodes, home_nodes(len(split), nodes.count)
        self._inputs = inputs or InputReader([split])
        self._number = self._inputs.number(split)

    @classmethod
    def uncached(
        cls, split: Split, hidden_shape: Callable[[Tensor], torch.Size], seed: int, inputs: InputReader | None = None
    ) -> "BatchLoader":
        """Makes a loader for plans without a cache level."""
        return cls(split, sample_source(split, hidden_shape), seed, inputs=inputs)

    @property
    def reads_ahead(self) -> bool:
        """True where workers read samples before their step begins."""
        return self._inputs.num_workers > 0 and bool(self.split.read_ahead)

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank read samples, or waited for them, so far; without those for the cache."""
        return self._inputs.waited_s

    def set_epoch(self, epoch: int) -> None:
        """Redraws random transforms."""
        self._epoch = epoch

    def prefetch(self, batches: Iterable[ComingBatch], topology: Topology, targets: bool = True) -> None:
        """Announces the global batches that come, which are read ahead from the cache, or else by workers.

        Args:
            batches: In their order, up to the next transition or beyond; one that comes otherwise is read then.
            topology: This rank's view of the plan.
            targets: As for :meth:`batch`.
        """
        if topology.is_idle:
            return
        if topology.plan.cache_level and topology.is_first:
            assert self._reader is not None, "a plan has a cache level and the loader has no cache"
            self._reader.prefetch(self._feature_request(coming, topology) for coming in batches)
        elif {*self._parts(topology, targets)} & {*self.split.read_ahead}:
            self._inputs.prefetch(
                self._request(coming, self._own_ids(coming.ids, topology), topology, targets) for coming in batches
            )

    def _feature_request(self, coming: ComingBatch, topology: Topology) -> Request:
        ids = self._own_ids(coming.ids, topology)
        return self._request_for(ids, self._num_tokens(coming.ids), coming.epoch)

    def _own_ids(self, global_ids: np.ndarray, topology: Topology) -> np.ndarray:
        """Returns the samples of a global batch that are read for this replica."""
        packed = self._packed_rows(global_ids, topology)
        return self._replica_batch(global_ids, topology).ids if packed is None else packed.documents

    def _request(self, coming: ComingBatch, own_ids: np.ndarray, topology: Topology, targets: bool) -> InputRequest:
        """Returns what this rank reads of a global batch from the data."""
        mix = self._mix(coming, topology) if targets else None
        parts = self._parts(topology, targets)
        return InputRequest(self._number, own_ids, self.padded(coming.ids), coming.epoch, parts, mix)

    def _parts(self, topology: Topology, targets: bool) -> tuple[str, ...]:
        """Returns the parts of a batch that a rank reads from the data: stages between need neither of the last two."""
        is_needed = {
            "context": self.split.row_length is None,  # packed rows have one of their own
            "inputs": topology.is_first and not topology.plan.cache_level,
            "targets": topology.is_last and targets,
        }
        return tuple(part for part in PARTS if is_needed[part])

    def _packed_rows(self, global_ids: np.ndarray, topology: Topology) -> PackedRows | None:
        if self.split.row_length is None:
            return None
        assert self.split.lengths is not None
        return packed_rows(global_ids, self.split.lengths, self.split.row_length, topology, LENGTH_STEP)

    def _request_for(self, ids: np.ndarray, num_tokens: int, epoch: int) -> Request:
        return Request(self.source, self.source.numbers(ids, epoch), num_tokens)

    def _replica_batch(self, global_ids: np.ndarray, topology: Topology) -> ReplicaBatch:
        plan = topology.plan
        if plan.cache_level and self._nodes.count > 1:
            nodes = [self._nodes.of_rank(rank) for rank in topology.reading_ranks]
            global_ids = reorder_for_locality(global_ids, self._homes[global_ids], nodes)
        multiple = plan.mesh.rows_multiple
        return replica_batch(global_ids, topology.share, plan.num_shares, plan.num_microbatches, multiple)

    def _num_tokens(self, global_ids: np.ndarray) -> int:
        return self.padded(global_ids) or int(self.source.lengths[0])

    def batch(self, ids: np.ndarray, topology: Topology, step: int = 0, targets: bool = True) -> Batch:
        """See :meth:`pipetransformer.runtime.batch.Loader.batch`."""
        packed, part = self._packed_rows(ids, topology), self._replica_batch(ids, topology)
        own_ids, num_tokens = part.ids if packed is None else packed.documents, self._num_tokens(ids)
        read = self._inputs.read(self._request(ComingBatch(ids, step, self._epoch), own_ids, topology, targets))
        inputs = read.inputs
        if topology.is_first and topology.plan.cache_level:
            assert self._reader is not None, "a plan has a cache level and the loader has no cache"
            inputs = self._reader.read(self._request_for(own_ids, num_tokens, self._epoch))
        if packed is not None:
            return self._packed_batch(ids, packed, step, inputs, read.targets)
        assert read.context is not None
        return Batch(
            ids=part.ids,
            inputs=inputs,
            context=read.context,
            targets=read.targets,
            weights=torch.from_numpy(part.weights.astype(np.float64)),
            keys=sample_keys(self._seed, step, part.ids),
            hidden_shape=(len(part.ids), num_tokens, self.source.hidden_size),
            loss_divisor=self._loss_divisor(ids),
        )

    def _packed_batch(
        self, global_ids: np.ndarray, rows: PackedRows, step: int, inputs: Tensor | None, targets: Tensor | None
    ) -> Batch:
        """Lays out the documents of a replica's rows, each of which was loaded as if it were alone."""
        return Batch(
            ids=rows.documents,
            inputs=None if inputs is None else rows.scatter(inputs, 0),
            context=rows.context(),
            targets=None if targets is None else rows.scatter(targets, IGNORED),
            weights=torch.from_numpy(rows.weights.astype(np.float64)),
            keys=sample_keys(self._seed, step, rows.first_documents),
            hidden_shape=(len(rows), rows.width, self.source.hidden_size),
            loss_divisor=self._loss_divisor(global_ids),
        )

    def _loss_divisor(self, global_ids: np.ndarray) -> float:
        weights = self.split.loss_weights
        return float(len(global_ids) if weights is None else weights[global_ids].sum()) or 1.0  # no token may count

    def padded(self, global_ids: np.ndarray) -> int | None:
        """See :func:`padded_length`."""
        return padded_length(self.split, global_ids)

    def _mix(self, coming: ComingBatch, topology: Topology) -> Mix | None:
        """Draws how this replica's rows of a global batch are mixed with their partners."""
        if self.split.mixing is None:
            return None
        assert not topology.plan.cache_level, "stored features are of single samples"
        rows = self._replica_batch(np.arange(len(coming.ids)), topology).ids
        return self.split.mixing.draw(self._seed, coming.step, coming.ids).take(rows)

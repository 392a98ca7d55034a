"""Which samples go where: the epoch's order, its global batches, each replica's rows of a batch, and their locality.

The loss of a global batch is the mean over its samples, and the random numbers of a sample depend on its id alone, so
it makes no difference which replica computes which sample. Where no node has room for all features, each replica takes
the samples that its node has cached::

    batch            a0 b1 c0 d0 e1 f0      (the digit is the sample's home node)
    2 replicas       a0 b1 c0 | d0 e1 f0    as they come: replica 0 on node 0 misses b, replica 1 on node 1 d and f
                     a0 c0 d0 | b1 e1 f0    reordered: only f is computed away from its home
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pipetransformer.autopipe.plan import microbatch_size


@dataclass(frozen=True, eq=False)
class ReplicaBatch:
    """A replica's rows of one global batch.

    Attributes:
        ids: Sample ids, shape (N,), N a multiple of the micro-batches.
        weights: 1 for a sample, 0 for a row that only fills up the shape, shape (N,).
    """

    ids: np.ndarray
    weights: np.ndarray


WINDOW = 50
"""Global batches among which samples are grouped by length."""


@dataclass(frozen=True, eq=False)
class SampleOrder:
    """The order of the samples in each epoch, the same on every rank and at any topology.

    Grouped by length, a batch has samples of about one length, and little padding::

        uniform       7 2 | 9 4 | 3 8 | 5         batches of 2, the digit is the sample's length
        by length     4 7 | 8 9 | 2 3 | 5         sorted within a window, whose batches come in a random order

    Attributes:
        num_samples: Samples of an epoch.
        seed: Of the draws.
        batch_size: Samples of a global batch.
        lengths: Tokens of each sample, shape (N,), by which batches are grouped; ``None``: the order is uniform.
    """

    num_samples: int
    seed: int
    batch_size: int
    lengths: np.ndarray | None = None

    def epoch(self, epoch: int) -> np.ndarray:
        """Returns the ids ``0 .. num_samples - 1`` in the order of an epoch, shape (N,)."""
        order = epoch_order(self.num_samples, epoch, self.seed)
        if self.lengths is None:
            return order
        num_whole = len(order) // self.batch_size * self.batch_size  # the smaller last batch is drawn from all
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch, 1])))
        size = WINDOW * self.batch_size
        windows = (order[first : min(first + size, num_whole)] for first in range(0, num_whole, size))
        return np.concatenate([*(self._grouped(ids, generator) for ids in windows), order[num_whole:]])

    def _grouped(self, ids: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Sorts the samples of a window by length, and draws the order of its batches."""
        assert self.lengths is not None
        batches = ids[np.argsort(self.lengths[ids], kind="stable")].reshape(-1, self.batch_size)
        return generator.permutation(batches).reshape(-1)

    def batches(self, first: int, end: int) -> Iterator[np.ndarray]:
        """Yields the ids of the global batches of steps ``first`` to ``end - 1`` of a run, each of shape (B,)."""
        epoch, order, steps_per_epoch = -1, np.empty(0), num_batches(self.num_samples, self.batch_size)
        for step in range(first, end):
            own, index = divmod(step, steps_per_epoch)
            if own != epoch:
                epoch, order = own, self.epoch(own)
            yield batch_ids(order, index, self.batch_size)

    def typical(self, lengths: np.ndarray | None) -> np.ndarray:
        """Returns the ids of samples that take about as long as those of most batches.

        They are the batch of an epoch whose longest sample is the median of all batches'. A batch is padded to its
        longest sample, which comes first. The seed makes no difference: jobs that differ in it measure the same.

        Args:
            lengths: Tokens of each sample, (N,); ``None``: all have as many, and any sample is typical.
        """
        if lengths is None:
            return np.arange(self.num_samples)
        order, num_whole = replace(self, seed=0).epoch(0), self.num_samples // self.batch_size
        batches = order[: num_whole * self.batch_size].reshape(num_whole, -1) if num_whole else order[None]
        longest = lengths[batches].max(1)
        ids = batches[np.argsort(longest, kind="stable")[len(longest) // 2]]
        return np.roll(ids, -int(lengths[ids].argmax()))


def epoch_order(num_samples: int, epoch: int, seed: int) -> np.ndarray:
    """Returns the ids ``0 .. num_samples - 1`` in the order of an epoch, shape (N,), the same on every rank."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(num_samples)


def num_batches(num_samples: int, batch_size: int) -> int:
    """Returns the global batches of an epoch, the last of which may be smaller."""
    return -(-num_samples // batch_size)


def batch_ids(order: np.ndarray, index: int, batch_size: int) -> np.ndarray:
    """Returns the ids of one global batch, shape (B,), fewer at the end of the epoch."""
    return order[index * batch_size : (index + 1) * batch_size]


def replica_batch(
    global_ids: np.ndarray, replica: int, num_replicas: int, num_microbatches: int, multiple: int = 1
) -> ReplicaBatch:
    """Returns a replica's rows, padded so that all replicas and micro-batches have equal shapes.

    Args:
        global_ids: The batch, shape (B,), B at least 1.
        replica: The replica's number.
        num_replicas: Replicas that split the batch, contiguously and evenly to one sample.
        num_microbatches: Micro-batches of each replica.
        multiple: Of the samples of a micro-batch.
    """
    num_samples = len(global_ids)
    first, end = (num_samples * bound // num_replicas for bound in (replica, replica + 1))
    num_rows = microbatch_size(num_samples, num_replicas, num_microbatches, multiple) * num_microbatches
    ids = np.full(num_rows, global_ids[0])  # (N,)
    weights = np.zeros(num_rows)  # (N,)
    ids[: end - first] = global_ids[first:end]
    weights[: end - first] = 1
    return ReplicaBatch(ids, weights)


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Distributes samples over rows by first-fit decreasing: the longest first, each into the first row with room.

    It takes at most 11/9 of the rows of the best packing, and one (Dosa, 2007).

    Args:
        lengths: Tokens of each sample, shape (B,), at most ``capacity``.
        capacity: Tokens of a row.

    Returns:
        The indices of the samples of each row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in np.argsort(-lengths, kind="stable"):
        length = int(lengths[index])
        assert length <= capacity, (length, capacity)
        row = next((row for row, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(int(index))
        room[row] -= length
    return [np.array(row) for row in rows]


def home_nodes(num_samples: int, num_nodes: int) -> np.ndarray:
    """Returns the node that caches each sample before others, (N,)."""
    return np.arange(num_samples) % num_nodes


def reorder_for_locality(global_ids: np.ndarray, homes: np.ndarray, nodes: Sequence[int]) -> np.ndarray:
    """Reorders a global batch so that each replica gets as many samples of its node as it can.

    Args:
        global_ids: The batch, (B,).
        homes: The home node of each of its samples, (B,).
        nodes: For each replica, the node on which it reads its samples.

    Returns:
        The same ids in another order, (B,). The replicas' rows stay contiguous, and as many as they were.
    """
    num_samples, num_replicas = len(global_ids), len(nodes)
    bounds = [num_samples * replica // num_replicas for replica in range(num_replicas + 1)]
    owner = np.full(num_samples, -1)  # (B,): of each row of the batch, a replica
    free = [end - first for first, end in pairwise(bounds)]
    for replica, node in enumerate(nodes):
        own = np.flatnonzero((homes == node) & (owner < 0))[: free[replica]]
        owner[own] = replica
        free[replica] -= len(own)
    owner[owner < 0] = np.repeat(np.arange(num_replicas), free)
    return global_ids[np.argsort(owner, kind="stable")]

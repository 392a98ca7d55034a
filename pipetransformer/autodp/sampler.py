"""Which samples go where: the epoch's order, its global batches, and each replica's share of a batch."""

from dataclasses import dataclass

import numpy as np

from pipetransformer.autopipe.layout import microbatch_size


@dataclass(frozen=True, eq=False)
class Share:
    """A replica's rows of one global batch.

    Attributes:
        ids: Sample ids, shape (N,), N a multiple of the micro-batches.
        weights: 1 for a sample, 0 for a row that only fills up the shape, shape (N,).
    """

    ids: np.ndarray
    weights: np.ndarray


def epoch_order(num_samples: int, epoch: int, seed: int) -> np.ndarray:
    """The ids ``0 .. num_samples - 1`` in the order of an epoch, shape (N,), the same on every rank."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(num_samples)


def num_batches(num_samples: int, batch_size: int) -> int:
    """Global batches of an epoch, the last of which may be smaller."""
    return -(-num_samples // batch_size)


def batch_ids(order: np.ndarray, index: int, batch_size: int) -> np.ndarray:
    """The ids of one global batch, shape (B,), fewer at the end of the epoch."""
    return order[index * batch_size : (index + 1) * batch_size]


def share(global_ids: np.ndarray, replica: int, num_replicas: int, num_microbatches: int) -> Share:
    """A replica's share of a global batch, padded so that all replicas and micro-batches have equal shapes.

    Args:
        global_ids: The batch, shape (B,), B at least 1.
        replica: Which of the replicas.
        num_replicas: Replicas that split the batch, contiguously and evenly to one sample.
        num_microbatches: Micro-batches that each share is cut into.
    """
    num_samples = len(global_ids)
    first, end = (num_samples * bound // num_replicas for bound in (replica, replica + 1))
    num_rows = microbatch_size(num_samples, num_replicas, num_microbatches) * num_microbatches
    ids = np.full(num_rows, global_ids[0])
    weights = np.zeros(num_rows)
    ids[: end - first] = global_ids[first:end]
    weights[: end - first] = 1
    return Share(ids, weights)

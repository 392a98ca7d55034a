"""Keeps samples with the node that has cached them, when a node has no room for all.

The loss of a global batch is the mean over its samples, and what is random about a sample depends on its number alone.
So it makes no difference which replica computes which sample of a batch, and each takes those of its own node first::

    batch            a0 b1 c0 d0 e1 f0      (the digit is the sample's home)
    2 replicas       a0 b1 c0 | d0 e1 f0    as they come: replica 0 on node 0 misses b, replica 1 on node 1 d and f
                     a0 c0 d0 | b1 e1 f0    at home: only f is computed away from its home
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pipetransformer.autodp.topology import pipeline_ranks
from pipetransformer.autopipe.plan import Plan


def home_nodes(num_samples: int, num_nodes: int) -> np.ndarray:
    """The node that keeps each sample before others, (N,)."""
    return np.arange(num_samples) % num_nodes


def reading_ranks(plan: Plan) -> tuple[int, ...]:
    """The rank that reads each replica's samples: that of its first stage."""
    return tuple(pipeline_ranks(plan, replica)[0] for replica in range(plan.num_replicas))


def reorder_for_locality(global_ids: np.ndarray, homes_of_ids: np.ndarray, nodes: Sequence[int]) -> np.ndarray:
    """Reorders a global batch so that each replica's share holds as many samples of its node as it can.

    Args:
        global_ids: The batch, (B,).
        homes_of_ids: The home of each of them, (B,).
        nodes: For each replica, where it reads.

    Returns:
        The same ids in another order, (B,): the shares stay contiguous and as large as they are.
    """
    num_samples, num_replicas = len(global_ids), len(nodes)
    bounds = [num_samples * replica // num_replicas for replica in range(num_replicas + 1)]
    owner = np.full(num_samples, -1)  # of each row of the batch, a replica
    free = [end - first for first, end in pairwise(bounds)]
    for replica, node in enumerate(nodes):
        own = np.flatnonzero((homes_of_ids == node) & (owner < 0))[: free[replica]]
        owner[own] = replica
        free[replica] -= len(own)
    owner[owner < 0] = np.repeat(np.arange(num_replicas), free)
    return global_ids[np.argsort(owner, kind="stable")]

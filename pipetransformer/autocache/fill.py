"""The work of a fill: shards that hold a wanted sample, batched where their samples are short."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import ceil, inf

import numpy as np

from pipetransformer.autocache.source import SampleSource
from pipetransformer.autocache.store import FeatureStore

TOKENS_AT_ONCE = 2048  # most padded tokens of a batch; with far fewer, launching takes longer than computing


@dataclass(frozen=True, eq=False)
class ShardSlice:
    """The wanted samples of one shard.

    Attributes:
        source: The split.
        store: The store of the split.
        shard: Its number in the store.
        ids: Numbers of the samples, of similar lengths, (B,).
        num_tokens: Tokens of the longest one.
    """

    source: SampleSource
    store: FeatureStore
    shard: int
    ids: np.ndarray
    num_tokens: int


def wanted_shards(source: SampleSource, store: FeatureStore, wanted: np.ndarray) -> Iterator[ShardSlice]:
    """Yields the shards that hold any of the wanted samples, in ascending order."""
    if not store.shards:
        return
    is_wanted = np.zeros(len(store.spec.lengths), dtype=bool)
    is_wanted[wanted] = True
    order = np.concatenate(store.shards)
    kept = is_wanted[order]
    starts = np.cumsum([0, *map(len, store.shards[:-1])])
    sizes = np.add.reduceat(kept, starts, dtype=np.int64)  # wanted samples of each shard
    longest = np.maximum.reduceat(np.where(kept, source.lengths[order], 0), starts)
    ids_of_shards = np.split(order[kept], np.cumsum(sizes[:-1]))
    for shard, (ids, num_tokens) in enumerate(zip(ids_of_shards, longest.tolist(), strict=True)):
        if len(ids):
            yield ShardSlice(source, store, shard, ids, num_tokens)


def batches(slices: Iterable[ShardSlice], local_world_size: int = 1) -> Iterator[list[ShardSlice]]:
    """Groups neighbouring slices of one split into batches that are computed at once.

    There are as few batches as possible, the same number for each rank of the node, and all of about the same size.
    """
    for _, group in groupby(slices, key=lambda one: id(one.store)):
        own = list(group)
        num_rounds = ceil(len(list(_packed(own, inf))) / local_world_size)
        num_tokens = sum(len(one.ids) * one.num_tokens for one in own)
        yield from _packed(own, num_tokens / (num_rounds * local_world_size))


def _packed(slices: list[ShardSlice], target: float) -> Iterator[list[ShardSlice]]:
    """Yields batches that end as near as possible to multiples of ``target`` tokens.

    None has more than TOKENS_AT_ONCE, except single slices.
    """
    batch: list[ShardSlice] = []
    done = num_batches = num_samples = longest = 0
    for one in slices:
        size = len(one.ids) * one.num_tokens
        num_samples, longest = num_samples + len(one.ids), max(longest, one.num_tokens)
        is_past = done + size / 2 > (num_batches + 1) * target  # nearer to the multiple without this slice
        if batch and (is_past or num_samples * longest > TOKENS_AT_ONCE):
            yield batch
            batch, num_samples, longest, num_batches = [], len(one.ids), one.num_tokens, num_batches + 1
        batch.append(one)
        done += size
    yield batch


def incomplete(batch: list[ShardSlice], key: int) -> list[ShardSlice]:
    """Returns the slices of a batch of which a sample is missing under the key."""
    ids = np.concatenate([one.ids for one in batch])
    missing = batch[0].store.missing_ids(ids, key)
    if len(missing) == len(ids):
        return batch
    return [one for one in batch if np.isin(one.ids, missing).any()]

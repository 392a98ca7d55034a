"""What a fill computes: shards that hold a wanted sample, several at once where their samples are short."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import ceil, inf

import numpy as np

from pipetransformer.autocache.source import SampleSource
from pipetransformer.autocache.store import FeatureStore

TOKENS_AT_ONCE = 2048  # padded; fewer leave a processor waiting for the next call


@dataclass(frozen=True, eq=False)
class ShardSlice:
    """The wanted samples of one shard.

    Attributes:
        shard: Its number in the store.
        ids: The samples, of similar lengths, (B,).
        num_tokens: Of the longest sample.
    """

    source: SampleSource
    store: FeatureStore
    shard: int
    ids: np.ndarray
    num_tokens: int


def wanted_shards(source: SampleSource, store: FeatureStore, wanted: np.ndarray) -> Iterator[ShardSlice]:
    """The shards that hold any of the wanted samples."""
    if not store.shards:
        return
    is_wanted = np.zeros(len(store.description.lengths), dtype=bool)
    is_wanted[wanted] = True
    order = np.concatenate(store.shards)
    kept = is_wanted[order]
    starts = np.cumsum([0, *map(len, store.shards[:-1])])
    sizes = np.add.reduceat(kept, starts, dtype=np.int64)
    longest = np.maximum.reduceat(np.where(kept, source.lengths[order], 0), starts)
    parts = np.split(order[kept], np.cumsum(sizes[:-1]))
    for shard, (ids, num_tokens) in enumerate(zip(parts, longest.tolist(), strict=True)):
        if len(ids):
            yield ShardSlice(source, store, shard, ids, num_tokens)


def batches(parts: Iterable[ShardSlice], local_world_size: int = 1) -> Iterator[list[ShardSlice]]:
    """Neighbours of one split that are computed at once.

    As few groups as may be, but as many for each worker, and all of about the same size.
    """
    for _, own in groupby(parts, key=lambda part: id(part.store)):
        run = list(own)
        num_rounds = ceil(len(list(_packed(run, inf))) / local_world_size)
        num_tokens = sum(len(part.ids) * part.num_tokens for part in run)
        yield from _packed(run, num_tokens / (num_rounds * local_world_size))


def _packed(parts: list[ShardSlice], wanted: float) -> Iterator[list[ShardSlice]]:
    """Groups that end as near as can be to multiples of the wanted tokens; none has too many, but single parts."""
    group: list[ShardSlice] = []
    done = num_groups = num_samples = longest = 0
    for part in parts:
        size = len(part.ids) * part.num_tokens
        num_samples, longest = num_samples + len(part.ids), max(longest, part.num_tokens)
        is_past = done + size / 2 > (num_groups + 1) * wanted
        if group and (is_past or num_samples * longest > TOKENS_AT_ONCE):
            yield group
            group, num_samples, longest, num_groups = [], len(part.ids), part.num_tokens, num_groups + 1
        group.append(part)
        done += size
    yield group


def missing_of(group: list[ShardSlice], key: int) -> list[ShardSlice]:
    """Those of a group that are not stored whole under a key."""
    ids = np.concatenate([part.ids for part in group])
    missing = group[0].store.missing(ids, key)
    if len(missing) == len(ids):
        return group
    return [part for part in group if np.isin(part.ids, missing).any()]

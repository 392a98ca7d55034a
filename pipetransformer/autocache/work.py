"""What a fill computes: shards that hold a wanted sample, several at once where their samples are short."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from pipetransformer.autocache.samples import SampleStore
from pipetransformer.autocache.source import Source

TOKENS_AT_ONCE = 2048  # padded; fewer leave a processor waiting for the next call


@dataclass(frozen=True, eq=False)
class Part:
    """The wanted samples of one shard.

    Attributes:
        shard: Its number in the store.
        ids: The samples, of similar lengths, (B,).
    """

    source: Source
    store: SampleStore
    shard: int
    ids: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Of the longest sample."""
        return int(self.source.lengths[self.ids].max())


def parts_of(source: Source, store: SampleStore, wanted: np.ndarray) -> Iterator[Part]:
    """The shards that hold any of the wanted samples."""
    is_wanted = np.zeros(len(store.description.lengths), dtype=bool)
    is_wanted[wanted] = True
    for shard, ids in enumerate(store.shards):
        if is_wanted[ids].any():
            yield Part(source, store, shard, ids[is_wanted[ids]])


def groups_of(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Neighbours of one split that are computed at once: one part at least, and no more than so many tokens."""
    group: list[Part] = []
    num_samples = longest = 0
    for part in parts:
        num_samples, longest = num_samples + len(part.ids), max(longest, part.num_tokens)
        if group and (part.source is not group[0].source or num_samples * longest > TOKENS_AT_ONCE):
            yield group
            group, num_samples, longest = [], len(part.ids), part.num_tokens
        group.append(part)
    if group:
        yield group

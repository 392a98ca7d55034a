"""Which samples a node keeps in memory and which on disk, and where their rows lie; pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RECORD_BYTES = 12  # a shard's key and checksum
MARK_BYTES = 1  # a sample's


@dataclass(frozen=True)
class Budgets:
    """Bytes that the features of a split may take on a node, with all that is stored about them."""

    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, eq=False)
class TierLayout:
    """Where a tier's samples lie. Rows of a sample follow each other, and so do the samples of a shard.

    The bytes of a tier are its rows, then key and checksum of each shard and a mark for each sample.

    Attributes:
        ids: The samples in the order of their rows, (K,).
        lengths: Rows of each of them, (K,).
        slots: Each sample's place in ``ids``, or -1, (N,).
        start: Each sample's first row, or -1, (N,).
        first_shard: Number of the first shard among the shards of the placement; the tier's own follow it.
        bounds: Where each shard begins in ``ids``, and where the last one ends, (S + 1,).
        row_bounds: The same in rows, (S + 1,).
        row_bytes: Bytes of a row.
    """

    ids: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    start: np.ndarray
    first_shard: int
    bounds: np.ndarray
    row_bounds: np.ndarray
    row_bytes: int

    @property
    def shards(self) -> range:
        """Numbers of the shards that lie here."""
        return range(self.first_shard, self.first_shard + len(self.bounds) - 1)

    @property
    def num_rows(self) -> int:
        return int(self.row_bounds[-1])

    @property
    def records_offset(self) -> int:
        """Where the rows end, with what fills up a word, in bytes."""
        return int(_records_offset(self.num_rows, self.row_bytes))

    @property
    def num_bytes(self) -> int:
        return int(_tier_bytes(self.num_rows, len(self.ids), len(self.shards), self.row_bytes))

    def slots_of(self, shard: int) -> slice:
        """Places of a shard's samples in ``ids``."""
        index = shard - self.first_shard
        return slice(int(self.bounds[index]), int(self.bounds[index + 1]))

    def rows_of(self, shard: int) -> slice:
        index = shard - self.first_shard
        return slice(int(self.row_bounds[index]), int(self.row_bounds[index + 1]))


@dataclass(frozen=True, eq=False)
class Placement:
    """The shards, each an array of sample ids that are computed together, and the tiers that hold them."""

    shards: tuple[np.ndarray, ...]
    memory: TierLayout | None
    disk: TierLayout | None

    @property
    def tiers(self) -> dict[str, TierLayout]:
        """Those that hold something, fastest first."""
        tiers = {"memory": self.memory, "disk": self.disk}
        return {name: layout for name, layout in tiers.items() if layout is not None}


def place(
    lengths: np.ndarray, row_bytes: int, budgets: Budgets, shard_size: int, seed: int, lasting: bool,
    is_local: np.ndarray | None = None,
) -> Placement:  # fmt: skip
    """Fills the tiers with samples in a random order that is the same everywhere and for ever.

    ::

        order of the samples   s0 s1 s2 s3 s4 s5 s6 s7 ...
        not lasting            [ memory  ][ disk  ]        as much as fits, without a gap
        lasting                [     disk     ]            what the disk has room for,
                               [ memory  ]                 and a copy of its beginning

    So the kept samples spread evenly over any part of the data. A tier stops at the first sample that does not fit,
    which loses less than that sample. The same arguments give the same placement, so a store needs to remember only
    them.

    Args:
        lengths: Rows of each sample, (N,), at least 1.
        row_bytes: Bytes of a row.
        shard_size: Samples of a shard, at most.
        lasting: The store shall outlive the run, so all of it is on disk, but for what only memory has room for.
        is_local: Samples that come before the others, bool (N,).
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    order = _order(len(lengths), seed)
    if is_local is not None:
        order = order[np.argsort(~is_local[order], kind="stable")]
    classes = _classes(order, lengths[order], row_bytes, budgets, shard_size, lasting)
    only_memory, both, only_disk = (_shards(ids, lengths, shard_size) for ids in classes)
    return Placement(
        shards=tuple(only_memory + both + only_disk),
        memory=_tier(only_memory + both, 0, lengths, row_bytes),
        disk=_tier(both + only_disk, len(only_memory), lengths, row_bytes),
    )


def _classes(
    order: np.ndarray, sizes: np.ndarray, row_bytes: int, budgets: Budgets, shard_size: int, lasting: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The samples that only memory has, that both tiers have, and that only the disk has."""
    if not lasting:
        memory = _num_fitting(sizes, row_bytes, budgets.memory_bytes, shard_size)
        disk = _num_fitting(sizes[memory:], row_bytes, budgets.disk_bytes, shard_size)
        return order[:memory], order[:0], order[memory : memory + disk]
    limits = (budgets.memory_bytes, budgets.disk_bytes)
    shared = min(_num_fitting(sizes, row_bytes, limit, shard_size) for limit in limits)
    memory, disk = (_num_fitting(sizes, row_bytes, limit, shard_size, shared) for limit in limits)
    return order[shared:memory], order[:shared], order[shared:disk]


def bytes_needed(lengths: np.ndarray, row_bytes: int, shard_size: int) -> int:
    """Bytes with which a tier has room for every sample, however many of them another tier holds too."""
    num_shards = -(-len(lengths) // shard_size) + 1  # one shard more where a shared part ends
    return int(_tier_bytes(int(np.sum(lengths)), len(lengths), num_shards, row_bytes))


def split_budget(budget_bytes: int, needed_bytes: Sequence[int]) -> tuple[int, ...]:
    """Shares of a budget in proportion to what each split needs, and never more than that."""
    total = sum(needed_bytes)
    if total <= budget_bytes:
        return tuple(needed_bytes)
    return tuple(budget_bytes * needed // total for needed in needed_bytes)


def _order(num_samples: int, seed: int) -> np.ndarray:
    """A permutation from raw bits, which numpy keeps the same in every version; it does not keep its permutations."""
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(num_samples)
    return np.argsort(bits, kind="stable")


def _num_fitting(sizes: np.ndarray, row_bytes: int, budget_bytes: int, shard_size: int, shared: int = 0) -> int:
    """How many samples fit, from the first on, at least the first ``shared``, which have shards of their own."""
    counts = np.arange(shared, len(sizes) + 1)
    num_rows = np.concatenate([[0], np.cumsum(sizes)])[shared:]
    num_shards = -(-shared // shard_size) + -(-(counts - shared) // shard_size)
    fits = _tier_bytes(num_rows, counts, num_shards, row_bytes) <= budget_bytes
    return shared + max(0, int(np.count_nonzero(fits)) - 1)


def _records_offset(num_rows: np.ndarray | int, row_bytes: int) -> np.ndarray | int:
    return -(-num_rows * row_bytes // 8) * 8  # keys are read as whole words


def _tier_bytes(
    num_rows: np.ndarray | int, num_samples: np.ndarray | int, num_shards: np.ndarray | int, row_bytes: int
) -> np.ndarray | int:
    return _records_offset(num_rows, row_bytes) + num_shards * RECORD_BYTES + num_samples * MARK_BYTES


def _shards(ids: np.ndarray, lengths: np.ndarray, shard_size: int) -> list[np.ndarray]:
    by_length = ids[np.argsort(lengths[ids], kind="stable")]  # similar lengths together: little padding
    return [by_length[first : first + shard_size] for first in range(0, len(ids), shard_size)]


def _tier(shards: list[np.ndarray], first_shard: int, lengths: np.ndarray, row_bytes: int) -> TierLayout | None:
    if not shards:
        return None
    ids = np.concatenate(shards)
    rows = _bounds(lengths[ids])
    bounds = _bounds(np.array([len(shard) for shard in shards]))
    slots, start = (np.full(len(lengths), -1, dtype=np.int64) for _ in range(2))
    slots[ids], start[ids] = np.arange(len(ids)), rows[:-1]
    return TierLayout(ids, lengths[ids], slots, start, first_shard, bounds, rows[bounds], row_bytes)


def _bounds(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)])

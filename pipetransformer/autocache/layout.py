"""Assignment of samples to the memory and the disk of a node, and the offsets of their rows; pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HEADER_BYTES = 12  # of a shard: uint64 key and uint32 checksum
FLAG_BYTES = 1  # of a sample: valid or not


@dataclass(frozen=True)
class Budgets:
    """Most bytes that the features of a split may take on a node, headers and flags included."""

    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, eq=False)
class TierLayout:
    """Offsets of a tier's samples. The rows of a sample are contiguous, and so are the samples of a shard.

    The bytes of a tier::

        rows | padding to 8 bytes | key of each shard | checksum of each shard | valid flag of each sample

    Attributes:
        ids: Samples in the order of their rows, (K,).
        lengths: Rows of each of them, (K,).
        slots: Index of each sample in ``ids``, or -1, (N,).
        start: First row of each sample, or -1, (N,).
        first_shard: Number of the tier's first shard within the store.
        bounds: Index in ``ids`` at which each shard begins, and the end of the last one, (S + 1,).
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
        """Numbers of the shards in this tier."""
        return range(self.first_shard, self.first_shard + len(self.bounds) - 1)

    @property
    def num_rows(self) -> int:
        """Rows of all samples."""
        return int(self.row_bounds[-1])

    @property
    def headers_offset(self) -> int:
        """Byte at which the shard headers begin."""
        return int(_headers_offset(self.num_rows, self.row_bytes))

    @property
    def num_bytes(self) -> int:
        """Size of the tier with headers and flags."""
        return int(_tier_bytes(self.num_rows, len(self.ids), len(self.shards), self.row_bytes))

    def slots_of(self, shard: int) -> slice:
        """Returns the slots of a shard's samples."""
        index = shard - self.first_shard
        return slice(int(self.bounds[index]), int(self.bounds[index + 1]))

    def rows_of(self, shard: int) -> slice:
        """Returns the rows of a shard."""
        index = shard - self.first_shard
        return slice(int(self.row_bounds[index]), int(self.row_bounds[index + 1]))


@dataclass(frozen=True, eq=False)
class StoreLayout:
    """Shards of a store, each an array of sample ids that are computed together, and the tiers that hold them."""

    shards: tuple[np.ndarray, ...]
    memory: TierLayout | None
    disk: TierLayout | None

    @property
    def tiers(self) -> dict[str, TierLayout]:
        """Tiers that hold something, fastest first."""
        tiers = {"memory": self.memory, "disk": self.disk}
        return {name: layout for name, layout in tiers.items() if layout is not None}


def assign_tiers(
    lengths: np.ndarray, row_bytes: int, budgets: Budgets, shard_size: int, seed: int, persistent: bool,
    is_local: np.ndarray | None = None,
) -> StoreLayout:  # fmt: skip
    """Assigns samples to the tiers in a random order that depends on the seed alone, whatever machine or version.

    ::

        order of the samples   s0 s1 s2 s3 s4 s5 s6 s7 ...
        not persistent         [ memory  ][ disk  ]        as much as fits, without a gap
        persistent             [     disk     ]            as much as fits on the disk,
                               [ memory  ]                 and a copy of its beginning

    The stored samples are therefore spread evenly over any part of the data. A tier ends at the first sample that does
    not fit, which wastes less than that sample. Equal arguments give equal layouts: a store has to remember only them.

    Args:
        lengths: Rows of each sample, (N,), at least 1.
        row_bytes: Bytes of a row.
        budgets: Of this store.
        shard_size: Most samples of a shard.
        seed: Of the order.
        persistent: The store outlives the run: everything is on disk, except what fits in memory only.
        is_local: Samples that are stored before the others, bool (N,).
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    order = _order(len(lengths), seed)
    if is_local is not None:
        order = order[np.argsort(~is_local[order], kind="stable")]
    classes = _classes(order, lengths[order], row_bytes, budgets, shard_size, persistent)
    only_memory, both, only_disk = (_shards(ids, lengths, shard_size) for ids in classes)
    return StoreLayout(
        shards=tuple(only_memory + both + only_disk),
        memory=_tier(only_memory + both, 0, lengths, row_bytes),
        disk=_tier(both + only_disk, len(only_memory), lengths, row_bytes),
    )


def _classes(
    order: np.ndarray, sizes: np.ndarray, row_bytes: int, budgets: Budgets, shard_size: int, persistent: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Splits the order into samples in memory only, in both tiers, and on disk only."""
    if not persistent:
        memory = _num_fitting(sizes, row_bytes, budgets.memory_bytes, shard_size)
        disk = _num_fitting(sizes[memory:], row_bytes, budgets.disk_bytes, shard_size)
        return order[:memory], order[:0], order[memory : memory + disk]
    limits = (budgets.memory_bytes, budgets.disk_bytes)
    shared = min(_num_fitting(sizes, row_bytes, limit, shard_size) for limit in limits)
    memory, disk = (_num_fitting(sizes, row_bytes, limit, shard_size, shared) for limit in limits)
    return order[shared:memory], order[:shared], order[shared:disk]


def bytes_needed(lengths: np.ndarray, row_bytes: int, shard_size: int) -> int:
    """Returns the bytes with which a tier holds every sample, however many of them another tier holds too."""
    num_shards = -(-len(lengths) // shard_size) + 1  # the end of the part in both tiers splits a shard
    return int(_tier_bytes(int(np.sum(lengths)), len(lengths), num_shards, row_bytes))


def split_budget(budget_bytes: int, needed_bytes: Sequence[int]) -> tuple[int, ...]:
    """Divides a budget in proportion to what each split needs, and never gives more than that."""
    total = sum(needed_bytes)
    if total <= budget_bytes:
        return tuple(needed_bytes)
    return tuple(budget_bytes * needed // total for needed in needed_bytes)


def _order(num_samples: int, seed: int) -> np.ndarray:
    """Draws a permutation from raw bits: those are stable across numpy versions, its permutations are not."""
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(num_samples)
    return np.argsort(bits, kind="stable")


def _num_fitting(sizes: np.ndarray, row_bytes: int, budget_bytes: int, shard_size: int, shared: int = 0) -> int:
    """Counts the samples that fit, from the first on. The first ``shared`` fit for sure, in shards of their own."""
    counts = np.arange(shared, len(sizes) + 1)
    num_rows = np.concatenate([[0], np.cumsum(sizes)])[shared:]
    num_shards = -(-shared // shard_size) + -(-(counts - shared) // shard_size)
    fits = _tier_bytes(num_rows, counts, num_shards, row_bytes) <= budget_bytes
    return shared + max(0, int(np.count_nonzero(fits)) - 1)


def _headers_offset(num_rows: np.ndarray | int, row_bytes: int) -> np.ndarray | int:
    return -(-num_rows * row_bytes // 8) * 8  # keys are aligned to words


def _tier_bytes(
    num_rows: np.ndarray | int, num_samples: np.ndarray | int, num_shards: np.ndarray | int, row_bytes: int
) -> np.ndarray | int:
    return _headers_offset(num_rows, row_bytes) + num_shards * HEADER_BYTES + num_samples * FLAG_BYTES


def _shards(ids: np.ndarray, lengths: np.ndarray, shard_size: int) -> list[np.ndarray]:
    by_length = ids[np.argsort(lengths[ids], kind="stable")]  # little padding within a shard
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

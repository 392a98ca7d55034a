"""Stored samples fit the budgets, have the right offsets, and are spread evenly over the data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autocache.layout import Budgets, StoreLayout, TierLayout, assign_tiers, bytes_needed, split_budget

ROW_BYTES, SHARD_SIZE = 12, 4
lengths_of = st.lists(st.integers(1, 9), min_size=1, max_size=40).map(np.array)
budget_of = st.integers(0, 4000)
cases = given(lengths_of, budget_of, budget_of, st.integers(0, 9), st.booleans())


def placed(lengths: np.ndarray, memory: int, disk: int, seed: int = 0, persistent: bool = False) -> StoreLayout:
    return assign_tiers(lengths, ROW_BYTES, Budgets(memory, disk), SHARD_SIZE, seed, persistent)


def kept(layout: TierLayout | None) -> list[int]:
    return [] if layout is None else layout.ids.tolist()


@cases
def test_no_tier_is_past_its_budget(lengths: np.ndarray, memory: int, disk: int, seed: int, persistent: bool) -> None:
    layout = placed(lengths, memory, disk, seed, persistent)
    budgets = {"memory": memory, "disk": disk}
    for name, tier in layout.tiers.items():
        assert tier.num_bytes <= budgets[name]
        num_rows = int(lengths[tier.ids].sum())
        assert tier.num_bytes >= num_rows * ROW_BYTES + 12 * len(tier.shards) + len(tier.ids), "all is counted"


@cases
def test_the_next_sample_would_not_fit(
    lengths: np.ndarray, memory: int, disk: int, seed: int, persistent: bool
) -> None:
    layout = placed(lengths, memory, disk, seed, persistent)
    order = kept(placed(np.ones_like(lengths), 10**6, 0, seed).memory)  # of equal lengths a shard keeps the order
    in_memory, on_disk = len(kept(layout.memory)), len(kept(layout.disk))
    for first, count, budget in ((0, in_memory, memory), (0 if persistent else in_memory, on_disk, disk)):
        if first + count < len(lengths):
            more = order[first : first + count + 1]
            assert bytes_needed(lengths[more], ROW_BYTES, SHARD_SIZE) + 12 > budget


@cases
def test_tiers_hold_the_same_beginning_or_follow_each_other(
    lengths: np.ndarray, memory: int, disk: int, seed: int, persistent: bool
) -> None:
    layout = placed(lengths, memory, disk, seed, persistent)
    in_memory, on_disk = kept(layout.memory), kept(layout.disk)
    assert len(set(in_memory)) == len(in_memory)
    assert len(set(on_disk)) == len(on_disk)
    everything = sorted(sample for shard in layout.shards for sample in shard.tolist())
    assert everything == sorted(set(in_memory) | set(on_disk)), "each is computed once"
    small, large = sorted([set(in_memory), set(on_disk)], key=len)
    assert small <= large if persistent else not small & large


@cases
def test_rows_of_a_shard_lie_together_and_in_order_of_length(
    lengths: np.ndarray, memory: int, disk: int, seed: int, persistent: bool
) -> None:
    layout = placed(lengths, memory, disk, seed, persistent)
    assert all(0 < len(shard) <= SHARD_SIZE for shard in layout.shards)
    for tier in layout.tiers.values():
        row = 0
        for number in tier.shards:
            shard = layout.shards[number]
            assert tier.ids[tier.slots_of(number)].tolist() == shard.tolist()
            assert tier.rows_of(number) == slice(row, row + lengths[shard].sum())
            assert np.all(np.diff(lengths[shard]) >= 0)
            for sample in shard:
                assert (tier.start[sample], tier.ids[tier.slots[sample]]) == (row, sample)
                row += lengths[sample]
        assert tier.num_rows == row
        absent = np.setdiff1d(np.arange(len(lengths)), tier.ids)
        assert np.all(tier.start[absent] == -1)
        assert np.all(tier.slots[absent] == -1)


@given(lengths_of, budget_of, st.booleans())
def test_what_is_needed_is_enough_whatever_the_other_tier_holds(
    lengths: np.ndarray, other: int, persistent: bool
) -> None:
    needed = bytes_needed(lengths, ROW_BYTES, SHARD_SIZE)
    assert sum(len(shard) for shard in placed(lengths, other, needed, persistent=persistent).shards) == len(lengths)
    assert len(kept(placed(lengths, needed, other, persistent=persistent).memory)) == len(lengths)


@given(st.integers(0, 999), st.floats(0.1, 0.9), st.booleans())
def test_any_half_of_the_samples_has_its_share(seed: int, share: float, sorted_data: bool) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 9, 2000)
    lengths = np.sort(lengths) if sorted_data else lengths
    budget = int(share / 2 * lengths.sum() * ROW_BYTES)
    layout = placed(lengths, budget, budget, seed)
    has = np.isin(np.arange(2000), np.concatenate(layout.shards))
    for half in (slice(0, 1000), slice(1000, 2000), slice(0, None, 2), generator.permutation(2000)[:1000]):
        assert abs(has[half].mean() - has.mean()) < 0.08, "five standard deviations"


def test_the_order_is_the_same_in_every_version() -> None:
    assert np.concatenate(placed(np.ones(8, dtype=int), 10**4, 0, seed=7).shards).tolist() == [6, 3, 4, 0, 2, 7, 5, 1]


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_splits_share_a_budget_by_need(budget: int, needed: list[int]) -> None:
    shares = split_budget(budget, needed)
    assert sum(shares) <= budget or shares == tuple(needed)
    assert sum(shares) <= budget
    assert all(share <= need for share, need in zip(shares, needed, strict=True))
    assert min(budget, sum(needed)) - sum(shares) < len(needed), "hardly a byte is lost"
    if sum(needed):
        assert shares == pytest.approx([min(1, budget / sum(needed)) * need for need in needed], abs=1)

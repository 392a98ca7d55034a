"""A fill computes every wanted sample once, and no more tokens at once than it shall."""

from collections.abc import Iterator
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.caches import FORMAT, make_source

from pipetransformer.autocache import fill
from pipetransformer.autocache.fill import ShardSlice, batches, wanted_shards
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autocache.store import FeatureStore, StoreSpec


def make_slices(lengths: list[int], wanted: list[int]) -> list[ShardSlice]:
    source = make_source([], np.array(lengths))
    store = FeatureStore.create(
        StoreSpec(source.lengths, FORMAT.hidden_size, FORMAT.dtype, "exact", Budgets(2**20, 0), Path("none"), 3, 0)
    )
    slices = list(wanted_shards(source, store, np.array(wanted, dtype=np.int64)))
    store.close()
    return slices


@pytest.fixture(autouse=True)
def _few_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(fill, "TOKENS_AT_ONCE", 20)
        yield


samples = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=20)


@given(samples)
def test_each_wanted_sample_is_in_one_slice_and_no_other_is(samples: list[tuple[int, bool]]) -> None:
    wanted = [number for number, (_, is_wanted) in enumerate(samples) if is_wanted]
    slices = make_slices([length for length, _ in samples], wanted)
    assert sorted(sample for one in slices for sample in one.ids.tolist()) == wanted
    assert [one.shard for one in slices] == sorted({one.shard for one in slices})
    assert all(set(one.ids) <= set(one.store.shards[one.shard]) for one in slices)
    assert [one.num_tokens for one in slices] == [max(samples[i][0] for i in one.ids) for one in slices]


@given(samples, st.integers(1, 3))
def test_groups_keep_the_order_and_are_no_larger_than_they_may_be(
    samples: list[tuple[int, bool]], local_world_size: int
) -> None:
    slices = make_slices([length for length, _ in samples], list(range(len(samples))))
    groups = list(batches(slices, local_world_size))
    assert [one for group in groups for one in group] == slices
    assert all(len(group) == 1 or padded(group) <= 20 for group in groups)


@given(num_parts=st.integers(1, 40), local_world_size=st.integers(1, 4))
def test_each_worker_gets_as_few_groups_of_about_the_same_size(num_parts: int, local_world_size: int) -> None:
    slices = make_slices([1] * 3 * num_parts, list(range(3 * num_parts)))
    sizes = [len(group) for group in batches(slices, local_world_size)]
    assert len(sizes) == min(num_parts, local_world_size * ceil(num_parts / 6 / local_world_size))
    assert max(sizes) - min(sizes) <= 1


def test_splits_are_not_mixed() -> None:
    slices = make_slices([1, 1], [0, 1]) + make_slices([1], [0])
    assert [len(group) for group in batches(slices)] == [1, 1]
    assert [len(group[0].ids) for group in batches(slices)] == [2, 1]


def padded(group: list[ShardSlice]) -> int:
    ids = np.concatenate([one.ids for one in group])
    return len(ids) * int(group[0].source.lengths[ids].max())

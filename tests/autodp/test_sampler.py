from dataclasses import replace
from itertools import pairwise
from math import ceil

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autodp.sampler import WINDOW, SampleOrder, batch_ids, epoch_order, num_batches, replica_batch

COUNTS = st.integers(1, 9)


@given(num_samples=st.integers(1, 40), num_replicas=COUNTS, num_microbatches=COUNTS)
def test_the_replicas_count_every_sample_once_in_order(
    num_samples: int, num_replicas: int, num_microbatches: int
) -> None:
    batch = np.arange(100, 100 + num_samples)
    parts = [replica_batch(batch, replica, num_replicas, num_microbatches) for replica in range(num_replicas)]
    counted = np.concatenate([part.ids[part.weights == 1] for part in parts])
    assert counted.tolist() == batch.tolist()
    assert sum(part.weights.sum() for part in parts) == num_samples


@given(num_samples=st.integers(1, 40), num_replicas=COUNTS, num_microbatches=COUNTS)
def test_all_replicas_have_the_same_whole_microbatches(
    num_samples: int, num_replicas: int, num_microbatches: int
) -> None:
    parts = [
        replica_batch(np.arange(num_samples), replica, num_replicas, num_microbatches)
        for replica in range(num_replicas)
    ]
    expected = ceil(ceil(num_samples / num_replicas) / num_microbatches) * num_microbatches
    assert {(len(part.ids), len(part.weights)) for part in parts} == {(expected, expected)}
    sizes = [part.weights.sum() for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_padding_repeats_the_first_sample_of_the_batch_at_weight_0() -> None:
    part = replica_batch(np.array([7, 8, 9]), replica=1, num_replicas=2, num_microbatches=4)
    assert part.ids.tolist() == [8, 9, 7, 7]
    assert part.weights.tolist() == [1, 1, 0, 0]


def test_a_replica_without_samples_gets_padding_alone() -> None:
    part = replica_batch(np.array([7]), replica=0, num_replicas=2, num_microbatches=1)
    assert (part.ids.tolist(), part.weights.tolist()) == ([7], [0])


@given(num_samples=st.integers(0, 60), batch_size=st.integers(1, 16), epoch=st.integers(0, 5))
def test_the_batches_of_an_epoch_hold_every_sample_once(num_samples: int, batch_size: int, epoch: int) -> None:
    order = epoch_order(num_samples, epoch, seed=1)
    batches = [batch_ids(order, index, batch_size) for index in range(num_batches(num_samples, batch_size))]
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert all(0 < len(batch) <= batch_size for batch in batches)
    assert sorted(int(sample) for batch in batches for sample in batch) == list(range(num_samples))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert epoch_order(50, epoch=1, seed=2).tolist() == epoch_order(50, epoch=1, seed=2).tolist()
    orders = {tuple(epoch_order(50, epoch, seed).tolist()) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9


def test_the_order_is_the_same_on_every_machine_and_numpy() -> None:
    assert epoch_order(8, epoch=0, seed=1).tolist() == [5, 0, 1, 4, 2, 6, 3, 7]


def batches_of(order: SampleOrder, epoch: int) -> list[np.ndarray]:
    ids = order.epoch(epoch)
    count = num_batches(order.num_samples, order.batch_size)
    return [batch_ids(ids, index, order.batch_size) for index in range(count)]


@given(num_samples=st.integers(0, 700), batch_size=st.integers(1, 16), epoch=st.integers(0, 3), data=st.data())
def test_batches_by_length_hold_every_sample_once_and_do_not_overlap_in_length(
    num_samples: int, batch_size: int, epoch: int, data: st.DataObject
) -> None:
    lengths = np.random.default_rng(data.draw(st.integers(0, 9))).integers(1, 50, num_samples)
    order = SampleOrder(num_samples, 1, batch_size, lengths)
    batches = batches_of(order, epoch)
    assert sorted(int(sample) for batch in batches for sample in batch) == list(range(num_samples))
    whole = [batch for batch in batches if len(batch) == batch_size]
    for first in range(0, len(whole), WINDOW):
        ranges = sorted((lengths[batch].min(), lengths[batch].max()) for batch in whole[first : first + WINDOW])
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))
    uniform = SampleOrder(num_samples, 1, batch_size).epoch(epoch)
    rest = num_samples % batch_size
    assert rest == 0 or batches[-1].tolist() == uniform[-rest:].tolist()


def test_batches_by_length_come_in_another_order_in_each_epoch_and_not_by_length() -> None:
    lengths = np.arange(320) % 40
    order = SampleOrder(320, 1, 4, lengths)
    first, second = (order.epoch(epoch).tolist() for epoch in (0, 1))
    assert first != second
    assert first == SampleOrder(320, 1, 4, lengths).epoch(0).tolist()
    longest = [lengths[batch].max() for batch in batches_of(order, 0)]
    assert longest != sorted(longest)


def test_batches_by_length_are_the_same_on_every_machine_and_numpy() -> None:
    lengths = np.array([4, 1, 3, 2, 4, 1, 2, 3, 9])
    assert SampleOrder(9, 1, 2, lengths).epoch(0).tolist() == [2, 0, 1, 5, 6, 7, 4, 8, 3]


def test_a_typical_batch_by_length_has_middle_lengths() -> None:
    lengths = np.arange(100)[::-1]
    found = lengths[SampleOrder(100, 1, 8, lengths).typical(lengths)]
    assert np.ptp(found) < 12  # of 96 that are drawn
    assert 40 <= found.mean() <= 60


def test_a_run_goes_over_the_batches_of_its_epochs_from_any_step() -> None:
    order = SampleOrder(10, 1, 4)
    whole = [ids.tolist() for epoch in range(3) for ids in batches_of(order, epoch)]
    for first in (0, 2, 3, 7):
        assert [ids.tolist() for ids in order.batches(first, 9)] == whole[first:]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    batch_size=COUNTS,
    size=COUNTS,
    seed=st.integers(0, 9),
)
def test_typical_samples_are_padded_as_the_median_batch_is(
    lengths: list[int], batch_size: int, size: int, seed: int
) -> None:
    order, known = SampleOrder(len(lengths), 0, batch_size), np.array(lengths)
    batches = list(order.batches(0, num_batches(len(lengths), batch_size)))
    whole = [batch for batch in batches if len(batch) == batch_size] or batches
    longest = sorted(known[batch].max() for batch in whole)
    ids = np.resize(order.typical(known), size)
    assert len(ids) == size
    assert known[ids[0]] == known[ids].max() == longest[len(longest) // 2]
    assert any(set(ids) <= set(batch) for batch in whole)
    assert np.resize(replace(order, seed=seed).typical(known), size).tolist() == ids.tolist()


def test_pictures_are_typical_as_they_come() -> None:
    assert np.resize(SampleOrder(3, 0, 2).typical(None), 5).tolist() == [0, 1, 2, 0, 1]

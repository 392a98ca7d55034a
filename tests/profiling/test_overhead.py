"""The parts of a step besides its layers are measured alike on every rank, and leave nothing behind."""

import pytest
from support.overheads import (
    between_empty_steps,
    contention,
    reading,
    schedule_overhead_by_a_clock,
    sharding_overhead,
    sharding_overhead_by_a_clock,
    step_overheads,
    waiting,
    work_of_steps,
)
from support.pool import Pool

from pipetransformer.profiling.overhead import FEW_MICROBATCHES, MANY_MICROBATCHES, OTHER_BYTES, WORK_S


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_hears_the_same_overheads_of_a_step_and_of_a_schedule(world: int, pool: Pool) -> None:
    measured = pool.run(world, step_overheads)
    assert len({seconds for seconds, _ in measured}) == 1
    step_s, *schedules_s = measured[0][0]
    assert step_s > 0
    assert min(schedules_s) >= 0, "on a busy machine more micro-batches may happen to take no longer"
    assert schedules_s == [0, 0] or world > 1, "one rank has no pipeline"
    assert all(num_groups == 0 for _, num_groups in measured), "process groups are destroyed"


def test_what_does_not_grow_with_the_micro_batches_is_no_overhead_of_one(pool: Pool) -> None:
    for step_s, schedule_s, gpipe_s in pool.run(3, schedule_overhead_by_a_clock, {"1f1b": 0.25, "gpipe": 0.125}):
        assert step_s == 1.25
        assert (schedule_s, gpipe_s) == pytest.approx((0.25 - 2 * WORK_S, 0.125 - 2 * WORK_S))


def test_a_schedule_is_measured_beside_passes_that_take_a_while(pool: Pool) -> None:
    counts = [0, *(2 * number for number in (FEW_MICROBATCHES, MANY_MICROBATCHES) * 2)]
    assert pool.run(3, work_of_steps) == [counts, counts, [0] * 5], (
        "forward and backward; replicas and an idle rank not"
    )


def test_before_an_empty_step_is_timed_more_is_computed_with_than_the_caches_of_a_core_hold(pool: Pool) -> None:
    assert pool.run(2, between_empty_steps) == [[OTHER_BYTES] * 5] * 2, "replicas, few and many micro-batches"


def test_every_rank_hears_the_same_overhead_of_sharding_without_the_link(pool: Pool) -> None:
    measured = pool.run(2, sharding_overhead, 0.0)
    assert len({seconds for seconds, _ in measured}) == 1
    assert measured[0][0][0] > 0
    assert all(num_groups == 0 for _, num_groups in measured), "process groups are destroyed"
    assert pool.run(2, sharding_overhead, 60.0) == [((0.0, 0.0), 0)] * 2, "no less than nothing"


def test_what_sharding_takes_for_its_bytes_is_told_from_what_it_takes_anyhow(pool: Pool) -> None:
    for overhead_s, byte_s in pool.run(2, sharding_overhead_by_a_clock):
        assert overhead_s == pytest.approx((9 - 3) / 3 - 1.5 * 0.001)
        update_s, link_s = 0.004 * 4096 / 2 / (8192 * 4), 1.5 * 1 / 1.5e6  # an all-reduce of two ranks moves all bytes
        assert byte_s == pytest.approx(0.006 * 2 * 4095 / 3 / (8192 * 4) - update_s - link_s)


def test_one_rank_has_nothing_to_shard(pool: Pool) -> None:
    assert pool.run(1, sharding_overhead, 0.0) == [((0.0, 0.0), 0)]


def test_contention_is_the_time_together_over_that_alone(pool: Pool) -> None:
    measured = pool.run(2, contention, 2)
    assert [seconds for seconds, _ in measured] == [1.5, 1.5]
    (_, first), (_, second) = measured
    assert first == 2 * second, "rank 0 works alone as often as together"


@pytest.mark.parametrize(("world", "devices_per_node"), [(1, 1), (2, 1)])
def test_ranks_that_share_nothing_have_no_contention(pool: Pool, world: int, devices_per_node: int) -> None:
    assert pool.run(world, contention, devices_per_node) == [(1.0, 0)] * world


@pytest.mark.parametrize(
    ("work_s", "most", "num_passes"),
    [(0.01, 12, 10 * 5 * 2), (0.01, 3, 15 * 3 * 2), (1.0, 12, 5 * 2)],
    ids=["a part of a step", "a whole step", "a long pass"],
)
def test_waiting_is_what_an_all_reduce_takes_more_after_work(
    work_s: float, most: int, num_passes: int, pool: Pool
) -> None:
    expected = ((4 - 2) + (4 - 3)) / 2 - 0.25
    assert pool.run(2, waiting, work_s, most) == [(expected, num_passes)] * 2


def test_one_rank_waits_for_nobody(pool: Pool) -> None:
    assert pool.run(1, waiting, 0.01, 12) == [(0.0, 0)]


def test_every_rank_hears_the_same_time_of_reading(pool: Pool) -> None:
    lines = pool.run(2, reading)
    assert lines[0] == lines[1]
    assert min(lines[0].fixed_s, lines[0].per_sample_s) >= 0

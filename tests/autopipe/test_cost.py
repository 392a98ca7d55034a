from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.correction import NO_CORRECTION, LayoutKind, TimedPlan
from pipetransformer.autopipe.cost import kind_of, layer_time, stage_seconds, step_scale, step_seconds
from pipetransformer.autopipe.plan import DeviceLayout, Layout, Plan, Stages, microbatch_size
from pipetransformer.autopipe.profile import (
    AffineTime,
    LayerProfile,
    PrefixSums,
    Profile,
)
from pipetransformer.autopipe.schedules import INTERLEAVED, ONE_F_ONE_B

# forward 1 s, input gradient 10 s, weight gradient 100 s per sample; no overhead
LAYER = LayerProfile("block", AffineTime(0, 1), AffineTime(0, 10), AffineTime(0, 100), 0.5, 1000, 7, 3)
PROFILE = Profile((LAYER,) * 4, optimizer_state_factor=2)
FREE_LINKS = Cluster(8, None, Link(0, float("inf")))
SLOW_LINKS = Cluster(8, None, Link(latency_s=0.25, bandwidth_bytes_per_s=4))
TWO_STAGES = ((0, 1), (2, 3))
PARTIAL = Profile(
    (replace(LAYER, forward=AffineTime(4, 1)),) * 4, 2, cache_read_s_per_byte=0.5, cache_miss_rate=0.25
)  # of which every fourth sample is not stored


def test_time_is_a_line_in_the_number_of_samples() -> None:
    assert (AffineTime(1, 2) + AffineTime(10, 20)).at(3) == 11 + 22 * 3


@pytest.mark.parametrize(("batch", "replicas", "microbatches", "size"), [(8, 2, 2, 2), (9, 2, 2, 3), (5, 2, 3, 1)])
def test_shares_are_padded_up_to_whole_microbatches(batch: int, replicas: int, microbatches: int, size: int) -> None:
    assert microbatch_size(batch, replicas, microbatches) == size


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.data())
def test_run_sums_include_both_ends(values: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(values) - 1))
    last = data.draw(st.integers(first, len(values) - 1))
    assert PrefixSums(values)(first, last) == sum(values[first : last + 1])


@pytest.mark.parametrize(
    ("num_frozen", "seconds"), [(0, [101, 111, 111, 111]), (1, [1, 1, 101, 111]), (2, [1, 1, 1, 101])]
)
def test_a_layer_does_what_its_place_above_the_frozen_prefix_asks(num_frozen: int, seconds: list[int]) -> None:
    assert [layer_time(PROFILE, layer, num_frozen).at(1) for layer in range(4)] == seconds


@pytest.mark.parametrize(("recompute", "expected"), [(False, 1 + 40), (True, 1 + 40 + 1 + 5)])
def test_the_lowest_layer_that_trains_has_a_backward_pass_of_its_own(recompute: bool, expected: float) -> None:
    """Its input takes no gradient, but the gradient goes through all of the block to the parameters below."""
    forward, own, whole, lowest = (AffineTime(0.0, seconds) for seconds in (1.0, 20.0, 30.0, 40.0))
    layer = LayerProfile(
        "layer", forward, own, whole, 0.0, 0, 0, 0, lowest_grad=lowest, checkpointing=AffineTime(5.0, 0.0)
    )
    known = Profile((layer,) * 4, optimizer_state_factor=2)
    times = [layer_time(known, index, 1, recompute).at(1) for index in range(4)]
    again = 1 + 5 if recompute else 0
    assert times == [1, 1, expected, 1 + 50 + again]


def test_checkpointing_computes_no_loss_again() -> None:
    head = replace(LAYER, forward=AffineTime(1.0, 10.0), loss_forward=AffineTime(0.5, 4.0))
    known = replace(PROFILE, layers=(*PROFILE.layers[:-1], head))
    once, twice = (layer_time(known, 3, 0, recompute).at(2) for recompute in (False, True))
    assert twice - once == 0.5 + 2 * 6


def test_overhead_is_paid_per_microbatch() -> None:
    profile = Profile((LayerProfile("block", AffineTime(1, 0), AffineTime(0, 0), AffineTime(0, 0), 0, 0, 0, 0),) * 4, 0)
    assert step_seconds(profile, FREE_LINKS, Plan(0, 0, ((0, 3),), 1, 6), batch_size=12) == 24


def test_one_stage_works_through_its_microbatches_and_updates_its_layers() -> None:
    plan = Plan(0, 0, ((0, 3),), num_replicas=1, num_microbatches=3)
    assert step_seconds(PROFILE, SLOW_LINKS, plan, batch_size=6) == 3 * 2 * 434 + 4 * 0.5


def test_a_pipeline_fills_and_then_keeps_the_pace_of_its_slowest_stage() -> None:
    plan = Plan(0, 0, TWO_STAGES, num_replicas=1, num_microbatches=3)
    assert step_seconds(PROFILE, FREE_LINKS, plan, batch_size=3) == 212 + 222 + 2 * 222 + 2 * 0.5


@pytest.mark.parametrize(("num_frozen", "num_messages"), [(0, 2), (1, 1), (2, 1)])
def test_a_gradient_comes_back_over_a_boundary_only_where_something_below_trains(
    num_frozen: int, num_messages: int
) -> None:
    plan = Plan(num_frozen, 0, TWO_STAGES, num_replicas=1, num_microbatches=1)
    without = step_seconds(PROFILE, FREE_LINKS, plan, batch_size=2)
    assert step_seconds(PROFILE, SLOW_LINKS, plan, batch_size=2) - without == num_messages * (0.25 + 3 * 2 / 4)


@pytest.mark.parametrize(("num_frozen", "num_active"), [(0, 2), (1, 2), (2, 1)])
def test_replicas_exchange_the_active_bytes_of_the_slowest_stage(num_frozen: int, num_active: int) -> None:
    one, four = (Plan(num_frozen, 0, TWO_STAGES, replicas, 1) for replicas in (1, 4))
    exchange_s = 0.25 + 2 * 3 / 4 * num_active * 1000 / 4
    assert step_seconds(PROFILE, SLOW_LINKS, four, 4) == step_seconds(PROFILE, SLOW_LINKS, one, 1) + exchange_s


def test_weights_that_never_train_are_not_exchanged() -> None:
    profile = Profile((replace(LAYER, fixed_bytes=900),) * 4, optimizer_state_factor=2)
    one, four = (Plan(0, 0, TWO_STAGES, replicas, 1) for replicas in (1, 4))
    exchange_s = 0.25 + 2 * 3 / 4 * 2 * 100 / 4
    assert step_seconds(profile, SLOW_LINKS, four, 4) == step_seconds(profile, SLOW_LINKS, one, 1) + exchange_s


def test_layers_without_parameters_exchange_nothing() -> None:
    profile = Profile((replace(LAYER, parameter_bytes=0),) * 4, optimizer_state_factor=2)
    assert step_seconds(profile, SLOW_LINKS, Plan(0, 0, ((0, 3),), 4, 1), 4) == 434 + 4 * 0.5


def test_cached_layers_cost_nothing() -> None:
    plan = Plan(2, 2, ((3, 3),), num_replicas=1, num_microbatches=1)
    assert step_seconds(PROFILE, FREE_LINKS, plan, batch_size=1) == 101 + 0.5


def test_chunks_shorten_the_wait_and_not_the_work() -> None:
    one_each = ONE_F_ONE_B.makespan([6.0] * 4, Layout(4, 1, 8))
    two_each = INTERLEAVED.makespan([3.0] * 8, Layout(8, 1, 8, stages_per_rank=2))
    assert (one_each, two_each) == (8 * 6 + 3 * 6, 8 * 6 + 3 * 6 / 2)


def test_with_few_microbatches_the_first_passes_all_stages() -> None:
    assert INTERLEAVED.makespan([3.0] * 8, Layout(8, 1, 2, stages_per_rank=2)) == 8 * 3 + 3


def test_the_busiest_device_sets_the_pace_over_all_its_stages() -> None:
    layout = Layout(4, 1, 10, stages_per_rank=2)
    assert INTERLEAVED.makespan([3, 1, 1, 3], layout) == 10 * 4 + 4 / 2
    assert INTERLEAVED.makespan([3, 1, 3, 1], layout) == 10 * 6 + 2 / 2


def test_chunks_add_transfers() -> None:
    plan = Plan(0, 0, ((0, 0), (1, 1), (2, 2), (3, 3)), 1, 2, "interleaved1f1b", stages_per_rank=2)
    boundary_s = 2 * (0.25 + 3 / 4)
    assert stage_seconds(PROFILE, SLOW_LINKS, plan, 2) == [101 + boundary_s, 111 + boundary_s, 111 + boundary_s, 111]


@pytest.mark.parametrize(("num_frozen", "num_active"), [(0, 4), (1, 2), (3, 0)])
def test_checkpointing_runs_the_active_layers_forward_twice(num_frozen: int, num_active: int) -> None:
    plan = Plan(num_frozen, 0, ((0, 3),), 1, 1)
    again = step_seconds(PROFILE, FREE_LINKS, replace(plan, recompute=True), batch_size=2)
    assert again - step_seconds(PROFILE, FREE_LINKS, plan, batch_size=2) == num_active * 2 * 1


def test_the_lowest_layer_waits_for_the_cache() -> None:
    profile = replace(PROFILE, cache_read_s_per_byte=0.5)
    plan = Plan(2, 2, ((3, 3),), num_replicas=1, num_microbatches=1)
    assert step_seconds(profile, FREE_LINKS, plan, batch_size=2) == 2 * (101 + 0.5 * 3) + 0.5
    uncached = Plan(2, 0, ((0, 3),), 1, 1)
    assert step_seconds(profile, FREE_LINKS, uncached, 2) == step_seconds(PROFILE, FREE_LINKS, uncached, 2)


@pytest.mark.parametrize("fill_read_s", [0.0, 16.0])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_the_cache_has_no_room_for_is_read_and_goes_through_the_frozen_layers_once_in_a_step(
    fill_read_s: float, num_microbatches: int
) -> None:
    profile = replace(PARTIAL, fill_read_s=fill_read_s)
    plan = Plan(2, 2, ((3, 3),), num_replicas=1, num_microbatches=num_microbatches)
    stored_s, missed_s = 0.75 * 0.5 * 3 * 8, 0.25 * 8 * fill_read_s + 3 * (4 + 0.25 * 8)
    active_s = 8 * 101 + 4 * num_microbatches
    assert step_seconds(profile, FREE_LINKS, plan, batch_size=8) == active_s + stored_s + missed_s + 0.5


def test_no_other_stage_hides_what_the_lowest_one_computes_before_the_first_micro_batch() -> None:
    plan = Plan(1, 1, ((2, 2), (3, 3)), num_replicas=1, num_microbatches=4)
    whole = step_seconds(replace(PARTIAL, cache_miss_rate=0.0, cache_read_s_per_byte=0.0), FREE_LINKS, plan, 8)
    missed_s = 2 * (4 + 0.25 * 8)
    assert step_seconds(replace(PARTIAL, cache_read_s_per_byte=0.0), FREE_LINKS, plan, 8) == whole + missed_s


@pytest.mark.parametrize(
    ("stages", "stages_per_rank", "num_neighbours"),
    [
        (((0, 3),), 1, [0]),
        (TWO_STAGES, 1, [1, 1]),
        (((0, 0), (1, 1), (2, 3)), 1, [1, 2, 1]),
        (((0, 0), (1, 1), (2, 2), (3, 3)), 2, [1, 2, 2, 1]),
    ],
    ids=["no schedule", "ends", "one between others", "two of a device"],
)
def test_the_schedule_of_a_pipeline_takes_its_time_for_each_neighbour_of_a_stage(
    stages: Stages, stages_per_rank: int, num_neighbours: list[int]
) -> None:
    schedule = "interleaved1f1b" if stages_per_rank > 1 else "1f1b"
    plan = Plan(0, 0, stages, 1, 4, schedule, stages_per_rank=stages_per_rank)
    profile = replace(PROFILE, schedule_overhead_s=7)
    seconds = (stage_seconds(each, FREE_LINKS, plan, 4) for each in (PROFILE, profile))
    assert [longer - plain for plain, longer in zip(*seconds, strict=True)] == [7 * number for number in num_neighbours]


def test_boundaries_and_rings_between_nodes_take_the_node_link() -> None:
    nodes = Cluster(8, None, Link(0, float("inf")), Link(1, 100), devices_per_node=2)
    inside, across = Plan(0, 0, TWO_STAGES, 4, 1), Plan(0, 0, TWO_STAGES, 4, 1, rank_order="replica-first")
    update_s = 2 * 0.5
    ring_bytes = 2 * 3 / 4 * 2 * 1000
    # two rings leave each node; side by side only one does, and both pipelines cross it
    assert step_seconds(PROFILE, nodes, inside, 4) == 212 + 222 + 1 + ring_bytes / 50 + update_s
    assert step_seconds(PROFILE, nodes, across, 4) == 212 + 222 + 2 * (1 + 3 / 50) + 1 + ring_bytes / 100 + update_s


SCALED = replace(
    PROFILE, step_overhead_s=5.0, read=AffineTime(2.0, 3.0), read_besides=AffineTime(0.5, 0.25), contention=2.0,
    cache_read_fixed_s=0.125,
)  # fmt: skip
ON_TWO = Cluster(2, None, Link(0, float("inf")))


def test_a_step_has_its_fixed_part_and_reading_once_however_many_micro_batches_it_has() -> None:
    plan = Plan(0, 0, ((0, 3),), num_replicas=2, num_microbatches=3)
    plain = step_seconds(PROFILE, ON_TWO, plan, batch_size=12)
    assert step_seconds(SCALED, ON_TWO, plan, batch_size=12) == plain + 5 + 2 + 3 * 6


@pytest.mark.parametrize(("stages", "num_replicas", "waits"), [(1, 1, 0), (1, 2, 1), (2, 1, 1)])
def test_devices_wait_for_each_other_once_in_a_step_where_there_are_several(
    stages: int, num_replicas: int, waits: int
) -> None:
    plan = Plan(0, 0, ((0, 3),) if stages == 1 else TWO_STAGES, num_replicas, num_microbatches=2)
    waiting = replace(PROFILE, waiting_s=7.0)
    plain = step_seconds(PROFILE, ON_TWO, plan, batch_size=4)
    assert step_seconds(waiting, ON_TWO, plan, batch_size=4) == plain + 7 * waits


def test_what_is_read_from_the_cache_is_not_read_again_and_all_else_is() -> None:
    plan = Plan(1, 1, ((2, 3),), num_replicas=2, num_microbatches=1)
    plain = step_seconds(PROFILE, ON_TWO, plan, batch_size=12)
    assert step_seconds(SCALED, ON_TWO, plan, batch_size=12) == plain + 5 + 0.5 + 0.25 * 6 + 0.125


@pytest.mark.parametrize(("num_busy", "factor"), [(1, 1 / 2), (2, 2 / 3), (3, 5 / 6), (4, 1), (8, 1)])
def test_a_device_is_faster_while_others_of_its_node_are_idle(num_busy: int, factor: float) -> None:
    assert SCALED.relief(num_busy, node_size=4) == pytest.approx(factor)
    assert SCALED.relief(num_busy, node_size=1) == 1


def test_one_device_of_two_is_predicted_as_if_it_were_alone() -> None:
    plan = Plan(0, 0, ((0, 3),), num_replicas=1, num_microbatches=1)
    plain = step_seconds(PROFILE, ON_TWO, plan, batch_size=4)
    assert step_seconds(SCALED, ON_TWO, plan, batch_size=4) == plain / 2 + 5 + 2 + 3 * 4


@pytest.mark.parametrize(
    ("devices", "fsdp", "kind"),
    [
        (DeviceLayout(1, 1), False, "single"),
        (DeviceLayout(1, 4), False, "data"),
        (DeviceLayout(1, 4), True, "sharded"),
        (DeviceLayout(4, 1), False, "pipeline"),
        (DeviceLayout(2, 2), False, "hybrid"),
    ],
)
def test_a_correction_counts_for_its_kind_of_layout(devices: DeviceLayout, fsdp: bool, kind: LayoutKind) -> None:
    assert kind_of(devices, fsdp) == kind
    slow = replace(SCALED, read_besides=AffineTime(0, 0), cache_read_fixed_s=0.0).with_timed(
        TimedPlan(kind, 0, 0, 1e3, 3e3)
    )
    assert step_scale(slow, FREE_LINKS, devices, 1, 8, fsdp).fixed_s == pytest.approx(3 * 5, rel=0.01)


def timed(profile: Profile, kind: LayoutKind, predicted_s: float, measured_s: float, num_frozen: int = 0) -> Profile:
    return profile.with_timed(TimedPlan(kind, num_frozen, 0, predicted_s, measured_s))


def test_plans_that_read_a_cache_are_corrected_apart_from_those_that_do_not() -> None:
    computing = timed(PROFILE, "data", 0.1, 0.11)
    assert computing.correction("data", is_cached=True) == computing.correction("data"), "until one is timed"
    both = computing.with_timed(TimedPlan("data", 2, 2, 0.05, 0.3))
    assert both.correction("data") == computing.correction("data")
    factor, extra_s = both.correction("data", is_cached=True)
    assert factor * 0.05 + extra_s == pytest.approx(0.3, rel=0.03)


def test_a_kind_that_was_not_timed_is_taken_for_no_slower_than_predicted() -> None:
    slow = timed(PROFILE, "pipeline", 100.0, 150.0)
    assert slow.correction("pipeline").factor == pytest.approx(1.5, rel=0.01)
    assert slow.correction("data").factor == 1
    fast = timed(timed(PROFILE, "pipeline", 100.0, 25.0), "single", 100.0, 50.0)
    assert fast.correction("data").factor == pytest.approx((0.25 * 0.5) ** 0.5, rel=0.02)
    assert PROFILE.correction("data") == NO_CORRECTION


@pytest.mark.parametrize("predicted_s", [1e-4, 1e-3, 1e-2, 1e-1, 10.0])
@pytest.mark.parametrize("ratio", [0.03, 0.5, 0.9, 1.0, 1.1, 2.0, 28.0])
def test_a_correction_gives_what_was_measured(predicted_s: float, ratio: float) -> None:
    factor, extra_s = timed(PROFILE, "data", predicted_s, ratio * predicted_s).correction("data")
    assert factor * predicted_s + extra_s == pytest.approx(ratio * predicted_s, rel=0.03)


def test_a_short_step_is_longer_by_seconds_and_a_long_one_by_a_factor() -> None:
    short = timed(PROFILE, "data", 0.001, 0.004).correction("data")
    assert short.factor < 1.2
    assert short.extra_s > 0.0025
    long = timed(PROFILE, "data", 1.0, 2.0).correction("data")
    assert long.factor == pytest.approx(2, rel=0.01)
    assert long.extra_s < 0.001


def test_two_plans_of_a_kind_tell_the_factor_and_the_seconds() -> None:
    both = timed(timed(PROFILE, "data", 0.1, 0.14), "data", 0.01, 0.032, num_frozen=4)
    factor, extra_s = both.correction("data")
    assert (factor, extra_s) == pytest.approx((1.2, 0.02), rel=0.06)


def test_plans_that_contradict_each_other_give_no_line_that_falls() -> None:
    """The longer step was overestimated by half, and the shorter one, on a busier machine, took longer than it."""
    both = timed(timed(PROFILE, "data", 0.08, 0.04), "data", 0.03, 0.05, num_frozen=2)
    factor, extra_s = both.correction("data")
    assert factor == pytest.approx(0.5)
    assert 0.05 > factor * 0.03 + extra_s > 0.03


@given(st.lists(st.tuples(st.floats(1e-3, 10), st.floats(1e-3, 10)), min_size=1, max_size=4))
def test_a_longer_step_is_predicted_to_be_longer_after_any_correction(times: list[tuple[float, float]]) -> None:
    profile = PROFILE
    for num_frozen, (predicted_s, measured_s) in enumerate(times):
        profile = timed(profile, "data", predicted_s, measured_s, num_frozen)
    factor, extra_s = profile.correction("data")
    assert factor >= min(1, *(measured_s / predicted_s for predicted_s, measured_s in times)) * 0.999
    assert extra_s >= 0


def test_the_last_time_of_a_plan_takes_the_place_of_an_older_one() -> None:
    again = timed(timed(PROFILE, "data", 100.0, 900.0), "data", 100.0, 110.0)
    assert len(again.timed) == 1
    assert again.correction("data").factor == pytest.approx(1.1, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "line"),
    [((3.0, 9.0), AffineTime(1, 2)), ((3.0, 2.0), AffineTime(2, 0)), ((1.0, 8.0), AffineTime(0, 2))],
    ids=["a line", "more samples took less", "no part is negative"],
)
def test_a_line_goes_through_two_measurements(seconds: tuple[float, float], line: AffineTime) -> None:
    assert AffineTime.through((1, 4), seconds) == line
    assert AffineTime.through((4, 4), (1.0, seconds[1])).at(4) == seconds[1]

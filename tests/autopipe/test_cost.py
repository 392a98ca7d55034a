from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autopipe.cost import (
    Cluster,
    LayerProfile,
    Profile,
    RunSums,
    Time,
    layer_seconds,
    microbatch_size,
    stage_memory_bytes,
    step_seconds,
)
from pipetransformer.autopipe.plan import Plan

# forward 1 s, input gradient 10 s, weight gradient 100 s per sample; no overhead
LAYER = LayerProfile("block", Time(0, 1), Time(0, 10), Time(0, 100), 0.5, 1000, 7, 3)
PROFILE = Profile((LAYER,) * 4, optimizer_state_factor=2)
FREE_LINKS = Cluster(8, None, latency_s=0, bandwidth_bytes_per_s=float("inf"))
SLOW_LINKS = Cluster(8, None, latency_s=0.25, bandwidth_bytes_per_s=4)
TWO_STAGES = ((0, 1), (2, 3))


def test_time_is_a_line_in_the_number_of_samples() -> None:
    assert (Time(1, 2) + Time(10, 20)).at(3) == 11 + 22 * 3


@pytest.mark.parametrize(("batch", "replicas", "microbatches", "size"), [(8, 2, 2, 2), (9, 2, 2, 3), (5, 2, 3, 1)])
def test_shares_are_padded_up_to_whole_microbatches(batch: int, replicas: int, microbatches: int, size: int) -> None:
    assert microbatch_size(batch, replicas, microbatches) == size


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.data())
def test_run_sums_include_both_ends(values: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(values) - 1))
    last = data.draw(st.integers(first, len(values) - 1))
    assert RunSums(values)(first, last) == sum(values[first : last + 1])


@pytest.mark.parametrize(
    ("num_frozen", "seconds"), [(0, [101, 111, 111, 111]), (1, [1, 1, 101, 111]), (2, [1, 1, 1, 101])]
)
def test_a_layer_does_what_its_place_above_the_frozen_prefix_asks(num_frozen: int, seconds: list[int]) -> None:
    assert [layer_seconds(PROFILE, layer, num_frozen, 1) for layer in range(4)] == seconds


def test_overhead_is_paid_per_microbatch() -> None:
    profile = Profile((LayerProfile("block", Time(1, 0), Time(0, 0), Time(0, 0), 0, 0, 0, 0),) * 4, 0)
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


def test_layers_without_parameters_exchange_nothing() -> None:
    profile = Profile((replace(LAYER, parameter_bytes=0),) * 4, optimizer_state_factor=2)
    assert step_seconds(profile, SLOW_LINKS, Plan(0, 0, ((0, 3),), 4, 1), 4) == 434 + 4 * 0.5


def test_cached_layers_cost_nothing() -> None:
    plan = Plan(2, 2, ((3, 3),), num_replicas=1, num_microbatches=1)
    assert step_seconds(PROFILE, FREE_LINKS, plan, batch_size=1) == 101 + 0.5


@pytest.mark.parametrize(("schedule", "num_in_flight"), [("1f1b", [2, 1]), ("gpipe", [3, 3])])
def test_memory_holds_weights_states_and_the_microbatches_in_flight(schedule: str, num_in_flight: list[int]) -> None:
    plan = Plan(0, 0, TWO_STAGES, num_replicas=1, num_microbatches=3, schedule=schedule)
    boundary = 3 * 2 * 3  # 3 bytes a sample, 2 samples, 3 micro-batches
    expected = [2 * 1000 * (1 + 1 + 2) + 2 * 7 * 2 * waiting + boundary for waiting in num_in_flight]
    assert list(stage_memory_bytes(PROFILE, plan, batch_size=6)) == expected


def test_frozen_layers_take_their_weights_alone() -> None:
    plan = Plan(1, 0, TWO_STAGES, num_replicas=1, num_microbatches=1)
    assert stage_memory_bytes(PROFILE, plan, batch_size=1) == (2 * 1000 + 3, 2 * (4000 + 7) + 3)


def test_what_is_read_from_the_cache_takes_memory_as_an_input() -> None:
    assert stage_memory_bytes(PROFILE, Plan(2, 2, ((3, 3),), 1, 1), batch_size=5) == (4000 + 5 * 7 + 5 * 3,)

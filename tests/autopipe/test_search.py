from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.autopipe.cost import (
    Cluster,
    LayerProfile,
    Profile,
    Time,
    stage_memory_bytes,
    step_seconds,
)
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.search import NoPlan, Pins, best_plan, check_world

MIB = 2**20


def layer(forward_s: float = 0.01, parameter_mib: int = 10, fixed_s: float = 0.0) -> LayerProfile:
    time = Time(fixed_s, forward_s)
    return LayerProfile("layer", time, time, time, parameter_mib * 1e-4, parameter_mib * MIB, 2 * MIB, MIB // 4)


def cluster(num_devices: int, memory_mib: float | None = None, bandwidth: float = 1e10) -> Cluster:
    return Cluster(num_devices, None if memory_mib is None else int(memory_mib * MIB), 1e-5, bandwidth)


BLOCKS = Profile((layer(),) * 6, optimizer_state_factor=2)


def all_plans(num_layers: int, num_devices: int, batch_size: int, level: int) -> Iterator[Plan]:
    """Every plan there is, with each number of micro-batches that the share allows."""
    first = level + 1 if level else 0
    for num_stages in range(1, min(num_devices, num_layers - first) + 1):
        for cuts in combinations(range(first + 1, num_layers), num_stages - 1):
            stages = tuple((start, end - 1) for start, end in pairwise([first, *cuts, num_layers]))
            for num_replicas in range(1, min(num_devices // num_stages, batch_size) + 1):
                for num_microbatches in range(1, ceil(batch_size / num_replicas) + 1):
                    schedule = "1f1b" if num_microbatches >= num_stages else "gpipe"
                    yield Plan(level, level, stages, num_replicas, num_microbatches, schedule)


LAYERS = st.builds(layer, st.floats(0.001, 0.05), st.integers(0, 50), st.sampled_from([0.0, 0.01]))


@settings(max_examples=60, deadline=None)
@given(
    profile=st.lists(LAYERS, min_size=3, max_size=5).map(lambda layers: Profile(tuple(layers), 2)),
    num_devices=st.integers(1, 5),
    batch_size=st.integers(1, 6),  # small enough for the search to try every number of micro-batches worth it
    bandwidth=st.sampled_from([1e7, 1e9, 1e11]),
    cached=st.booleans(),
    data=st.data(),
)
def test_no_plan_that_fits_is_faster(
    profile: Profile, num_devices: int, batch_size: int, bandwidth: float, cached: bool, data: st.DataObject
) -> None:
    level = 1 if cached else 0
    plans = list(all_plans(len(profile.layers), num_devices, batch_size, level))
    needed = [max(stage_memory_bytes(profile, plan, batch_size)) for plan in plans]
    budget = data.draw(st.sampled_from(needed))
    devices = replace(cluster(num_devices, bandwidth=bandwidth), device_memory_bytes=budget)
    found = best_plan(profile, devices, batch_size, level, level)
    fastest_s = min(
        step_seconds(profile, devices, plan, batch_size)
        for plan, num_bytes in zip(plans, needed, strict=True)
        if num_bytes <= budget
    )
    assert max(stage_memory_bytes(profile, found, batch_size)) <= budget
    assert found.predicted_step_s == step_seconds(profile, devices, found, batch_size)
    assert found.predicted_step_s == pytest.approx(fastest_s, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    profile=st.lists(LAYERS, min_size=3, max_size=5).map(lambda layers: Profile(tuple(layers), 2)),
    num_devices=st.integers(1, 5),
    batch_size=st.integers(1, 6),
)
def test_a_budget_that_is_too_small_is_told_the_smallest_that_is_not(
    profile: Profile, num_devices: int, batch_size: int
) -> None:
    plans = all_plans(len(profile.layers), num_devices, batch_size, level=0)
    smallest = min(max(stage_memory_bytes(profile, plan, batch_size)) for plan in plans)
    devices = cluster(num_devices)
    with pytest.raises(NoPlan) as error:
        best_plan(profile, replace(devices, device_memory_bytes=smallest - 1), batch_size)
    assert "raise parallel.device_memory_gib" in str(error.value)
    told_gib = float(str(error.value).split("at least ")[1].split(" GiB")[0])
    assert smallest <= told_gib * 2**30 < smallest + 0.0011 * 2**30
    assert best_plan(profile, replace(devices, device_memory_bytes=int(told_gib * 2**30)), batch_size)


def test_a_model_that_fits_one_device_is_trained_data_parallel() -> None:
    plan = best_plan(BLOCKS, cluster(4), batch_size=32)
    assert (plan.num_stages, plan.num_replicas, plan.num_microbatches) == (1, 4, 1)


def test_a_model_that_fits_no_device_is_cut_into_stages() -> None:
    plan = best_plan(BLOCKS, cluster(4, memory_mib=150), batch_size=32)
    assert plan.num_stages > 1
    assert max(stage_memory_bytes(BLOCKS, plan, 32)) <= 150 * MIB


def test_freezing_frees_devices_for_replicas() -> None:
    devices = cluster(4, memory_mib=150)
    plans = [best_plan(BLOCKS, devices, 32, level, level) for level in (0, 2, 4)]
    assert [plan.first_layer for plan in plans] == [0, 3, 5]
    assert plans[0].num_replicas < plans[2].num_replicas
    assert plans[0].predicted_step_s > plans[1].predicted_step_s > plans[2].predicted_step_s


def test_devices_that_do_not_help_stay_idle() -> None:
    assert best_plan(BLOCKS, cluster(4, bandwidth=1e5), batch_size=32).num_devices == 1
    assert best_plan(BLOCKS, cluster(8), batch_size=5).num_replicas == 5


def test_the_exchange_of_a_heavy_layer_moves_the_boundary() -> None:
    profile = Profile((layer(0.001, 400), *(layer(0.01, 40),) * 4), 2)
    pins = Pins(num_stages=2, num_replicas=2)
    stages = [best_plan(profile, cluster(4, bandwidth=speed), 8, pins=pins).stages for speed in (1e8, 1e12)]
    assert stages == [((0, 0), (1, 4)), ((0, 2), (3, 4))]


def test_1f1b_is_preferred_where_torch_runs_it() -> None:
    schedules = [
        best_plan(BLOCKS, cluster(2), 32, pins=Pins(num_stages=2, num_microbatches=count)).schedule for count in (2, 1)
    ]
    assert schedules == ["1f1b", "gpipe"]


def test_a_pinned_1f1b_has_a_microbatch_for_each_stage() -> None:
    slow_start = Profile((layer(fixed_s=1.0),) * 6, 2)
    counts = [
        best_plan(slow_start, cluster(4), 32, pins=Pins(num_stages=4, schedule=schedule)).num_microbatches
        for schedule in ("gpipe", "1f1b")
    ]
    assert counts[0] < counts[1] == 4


def test_microbatches_are_not_only_powers_of_two() -> None:
    profile = Profile((layer(fixed_s=0.02),) * 6, 2)
    assert best_plan(profile, cluster(2), 24, pins=Pins(num_stages=2)).num_microbatches == 3


def test_of_equally_fast_plans_the_one_with_fewer_microbatches_is_taken() -> None:
    one_by_one = Plan(0, 0, ((0, 5),), num_replicas=1, num_microbatches=2)
    budget = max(stage_memory_bytes(BLOCKS, one_by_one, 2))
    saved_s = 0.01 * (2 + 5 * 3)  # what the second replica saves, and loses again to the exchange
    devices = Cluster(2, budget, latency_s=0, bandwidth_bytes_per_s=60 * MIB / saved_s)
    found = best_plan(BLOCKS, devices, 2, pins=Pins(num_stages=1))
    assert (found.num_microbatches, found.num_replicas) == (1, 2)
    assert found.predicted_step_s == pytest.approx(step_seconds(BLOCKS, devices, one_by_one, 2))


@pytest.mark.parametrize(
    "pins",
    [
        {"num_stages": 3},
        {"num_replicas": 2},
        {"num_microbatches": 5},
        {"num_stages": 2, "schedule": "gpipe"},
        {"stages": ((0, 0), (1, 5))},
    ],
)
def test_what_is_fixed_stays_fixed(pins: dict[str, Any]) -> None:
    plan = best_plan(BLOCKS, cluster(4), batch_size=32, pins=Pins(**pins))
    assert {name: getattr(plan, name) for name in pins} == pins


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (Pins(num_stages=7), r"parallel\.num_stages=7 is more than the 6 layers"),
        (Pins(num_stages=3, num_replicas=3), r"num_stages=3 x .*num_replicas=3 need 9 devices, and there are 8.*world"),
        (Pins(num_replicas=5), r"num_replicas=5 x parallel\.num_microbatches=1 is more than batch_size=4"),
        (Pins(num_replicas=2, num_microbatches=3), r"num_replicas=2 x parallel\.num_microbatches=3 .*batch_size=4"),
        (Pins(num_stages=3, num_microbatches=2, schedule="1f1b"), r"num_stages=3 stages.*at most 2.*gpipe"),
        (Pins(stages=((0, 2), (4, 5))), r"do not cover layers 0 to 5"),
        (Pins(stages=((0, 2), (3, 5)), num_stages=3), r"num_stages=3 contradicts the fixed stages"),
    ],
)
def test_pins_that_collide_are_named(pins: Pins, message: str) -> None:
    with pytest.raises(NoPlan, match=message):
        best_plan(BLOCKS, cluster(8), batch_size=4, pins=pins)


def test_fixed_stages_must_fit_the_memory_too() -> None:
    with pytest.raises(NoPlan, match=r"no plan fits parallel\.device_memory_gib=0\.09766"):
        best_plan(BLOCKS, cluster(2, memory_mib=100), 4, pins=Pins(stages=((0, 0), (1, 5))))


@pytest.mark.parametrize("schedule", ["ZBV", "DualPipeV", "InterleavedZeroBubble"])
def test_an_unknown_schedule_is_told_the_known_ones(schedule: str) -> None:
    with pytest.raises(ValueError, match=f"schedule={schedule} does not exist; choose one of gpipe, 1f1b"):
        Pins(schedule=schedule)


def test_a_pin_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"parallel\.num_replicas=0 must be at least 1"):
        Pins(num_replicas=0)


def test_a_world_that_the_batch_cannot_fill_is_refused() -> None:
    check_world(num_devices=12, num_layers=6, batch_size=2)
    with pytest.raises(NoPlan, match=r"world_size=13 is more than 6 layers x batch_size=2"):
        check_world(num_devices=13, num_layers=6, batch_size=2)

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.correction import TimedPlan
from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.plan import Layout, Plan, RankOrder
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.autopipe.search.bounds import LowerBounds
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.autopipe.search.solver import PartitionSolver
from pipetransformer.errors import InfeasiblePlan, UserError

MIB = 2**20


def layer(forward_s: float = 0.01, parameter_mib: int = 10, fixed_s: float = 0.0) -> LayerProfile:
    time = AffineTime(fixed_s, forward_s)
    return LayerProfile("layer", time, time, time, parameter_mib * 1e-4, parameter_mib * MIB, 2 * MIB, MIB // 4)


def cluster(num_devices: int, memory_mib: float | None = None, bandwidth: float = 1e10) -> Cluster:
    return Cluster(num_devices, None if memory_mib is None else int(memory_mib * MIB), Link(1e-5, bandwidth))


BLOCKS = Profile((layer(),) * 6, optimizer_state_factor=2)


def all_plans(num_layers: int, devices: Cluster, batch_size: int, level: int) -> Iterator[Plan]:
    """Every plan there is, with each number of micro-batches that the share allows."""
    first = level + 1 if level else 0
    for num_stages, stages_per_rank in product(range(1, num_layers - first + 1), (1, 2, 3, 4)):
        size = num_stages // stages_per_rank
        if size > devices.num_devices or num_stages % stages_per_rank or (size == 1 and stages_per_rank > 1):
            continue
        for cuts in combinations(range(first + 1, num_layers), num_stages - 1):
            stages = tuple((start, end - 1) for start, end in pairwise([first, *cuts, num_layers]))
            for arrangement in all_arrangements(size, stages_per_rank, devices, batch_size):
                yield Plan(level, level, stages, **arrangement)


def all_arrangements(size: int, stages_per_rank: int, devices: Cluster, batch_size: int) -> Iterator[dict[str, Any]]:
    for num_replicas in range(1, min(devices.num_devices // size, batch_size) + 1):
        for num_microbatches in range(1, ceil(batch_size / num_replicas) + 1):
            if stages_per_rank > 1 and num_microbatches % max(1, num_microbatches // size):
                continue
            plain = ["1f1b", "gpipe"][num_microbatches < size : 1 + (size > 1)] if stages_per_rank == 1 else []
            schedules = plain or ["interleaved1f1b"]
            for schedule, recompute, rank_order in product(schedules, (False, True), RankOrder.__args__):
                if rank_order == "pipeline-first" or fills_nodes(devices, num_replicas):
                    yield {
                        "num_replicas": num_replicas,
                        "num_microbatches": num_microbatches,
                        "schedule": schedule,
                        "stages_per_rank": stages_per_rank,
                        "recompute": recompute,
                        "rank_order": rank_order,
                    }


def fills_nodes(devices: Cluster, num_replicas: int) -> bool:
    size = devices.node_size
    return size is not None and (num_replicas % size == 0 or size % num_replicas == 0)


LAYERS = st.builds(layer, st.floats(0.001, 0.05), st.integers(0, 50), st.sampled_from([0.0, 0.01]))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Layers that all hand over equally much, where the search is exact; the head may save next to nothing."""
    layers = draw(st.lists(LAYERS, min_size=3, max_size=5))
    output_bytes = draw(st.sampled_from([MIB // 4, 8 * MIB]))
    layers = [replace(each, output_bytes=output_bytes) for each in layers]
    layers[-1] = replace(layers[-1], activation_bytes=draw(st.sampled_from([0, 2 * MIB])))
    schedule_overhead_s, missing = draw(st.sampled_from([0.0, 0.05])), draw(st.sampled_from([0.0, 0.5]))
    read = AffineTime(*draw(st.sampled_from([(0.0, 0.0), (0.01, 0.002)])))
    kinds = st.sampled_from(["single", "data", "pipeline", "hybrid"])
    times = draw(st.dictionaries(kinds, st.tuples(*[st.sampled_from([0.01, 0.1, 1.0])] * 2)))
    timed = tuple(TimedPlan(kind, 0, 0, *seconds) for kind, seconds in times.items())
    return Profile(
        tuple(layers), 2, 1e-9, missing, schedule_overhead_s, step_overhead_s=draw(st.sampled_from([0.0, 0.02])),
        waiting_s=draw(st.sampled_from([0.0, 0.03])),
        read=read, fill_read_s=draw(st.sampled_from([0.0, 0.02])), contention=draw(st.sampled_from([1.0, 1.8])),
        timed=timed, read_besides=draw(st.sampled_from([AffineTime(0.0, 0.0), AffineTime(0.005, 0.001)])),
        gpipe_overhead_s=draw(st.sampled_from([None, 0.0, 0.02, 0.1])),
    )  # fmt: skip


PROFILES = profiles()
CLUSTERS = st.builds(
    Cluster,
    num_devices=st.integers(1, 6),
    device_memory_bytes=st.none(),
    link=st.sampled_from([Link(1e-5, 1e7), Link(1e-5, 1e9), Link(1e-5, 1e11)]),
    node_link=st.sampled_from([None, Link(1e-4, 1e6), Link(1e-4, 1e8)]),
    devices_per_node=st.sampled_from([2, 3, 4]),
).filter(lambda devices: devices.node_link is None or nothing_gained_between_nodes(devices.link, devices.node_link))


def nothing_gained_between_nodes(link: Link, node_link: Link) -> bool:
    """The search leaves out replicas that only add a node, which is right where that cannot be faster."""
    return node_link.bandwidth_bytes_per_s <= link.bandwidth_bytes_per_s


@settings(max_examples=60, deadline=None)
@given(
    profile=PROFILES,
    devices=CLUSTERS,
    batch_size=st.integers(1, 6),  # small enough for the search to try every number of micro-batches worth it
    cached=st.booleans(),
    data=st.data(),
)
def test_no_plan_that_fits_is_faster(
    profile: Profile, devices: Cluster, batch_size: int, cached: bool, data: st.DataObject
) -> None:
    level = 1 if cached else 0
    plans = list(all_plans(len(profile.layers), devices, batch_size, level))
    needed = [max(device_memory_bytes(profile, plan, batch_size)) for plan in plans]
    budget = data.draw(st.sampled_from([None, *sorted(set(needed))]))
    devices = replace(devices, device_memory_bytes=budget)
    found = best_plan(profile, devices, batch_size, level, level)
    fastest_s = min(
        step_seconds(profile, devices, plan, batch_size)
        for plan, num_bytes in zip(plans, needed, strict=True)
        if budget is None or num_bytes <= budget
    )
    assert budget is None or max(device_memory_bytes(profile, found, batch_size)) <= budget
    assert found.predicted_step_s == step_seconds(profile, devices, found, batch_size)
    assert found.predicted_step_s == pytest.approx(fastest_s, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(profile=PROFILES, num_devices=st.integers(1, 5), batch_size=st.integers(1, 6))
def test_a_budget_that_is_too_small_is_told_the_smallest_that_is_not(
    profile: Profile, num_devices: int, batch_size: int
) -> None:
    devices = cluster(num_devices)
    plans = all_plans(len(profile.layers), devices, batch_size, level=0)
    smallest = min(max(device_memory_bytes(profile, plan, batch_size)) for plan in plans)
    with pytest.raises(InfeasiblePlan) as error:
        best_plan(profile, replace(devices, device_memory_bytes=smallest - 1), batch_size)
    assert "raise device_memory_gib" in str(error.value)
    layout = r"\(with num_stages=\d, num_replicas=\d(, activation checkpointing)? and num_microbatches=\d\)"
    assert re.search(layout, str(error.value))
    told_gib = float(str(error.value).split("at least ")[1].split(" GiB")[0])
    assert smallest <= told_gib * 2**30 < smallest + 0.0011 * 2**30
    assert best_plan(profile, replace(devices, device_memory_bytes=int(told_gib * 2**30)), batch_size)


def test_a_model_that_fits_one_device_is_trained_data_parallel() -> None:
    plan = best_plan(BLOCKS, cluster(4), batch_size=32)
    assert (plan.num_stages, plan.num_replicas, plan.num_microbatches) == (1, 4, 1)


def test_a_model_that_fits_no_device_is_cut_into_stages() -> None:
    plan = best_plan(BLOCKS, cluster(4, memory_mib=150), batch_size=32)
    assert plan.num_stages > 1
    assert max(device_memory_bytes(BLOCKS, plan, 32)) <= 150 * MIB


@pytest.mark.parametrize(
    ("gpipe_overhead_s", "memory_mib", "schedule"),
    [(None, None, "1f1b"), (0.01, None, "1f1b"), (0.001, None, "gpipe"), (0.001, 250, "1f1b")],
    ids=["as fast", "slower", "faster", "no room"],
)
def test_gpipe_is_taken_where_it_takes_less_time_and_fits(
    gpipe_overhead_s: float | None, memory_mib: int | None, schedule: str
) -> None:
    profile = replace(BLOCKS, schedule_overhead_s=0.005, gpipe_overhead_s=gpipe_overhead_s)
    two = PlanConstraints(num_stages=2, num_replicas=1, num_microbatches=8, recompute=False)
    assert best_plan(profile, cluster(2, memory_mib), 32, constraints=two).schedule == schedule


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
    constraints = PlanConstraints(num_stages=2, num_replicas=2)
    stages = [
        best_plan(profile, cluster(4, bandwidth=speed), 8, constraints=constraints).stages for speed in (1e8, 1e12)
    ]
    assert stages == [((0, 0), (1, 4)), ((0, 2), (3, 4))]


def test_1f1b_is_preferred_where_torch_runs_it() -> None:
    schedules = [
        best_plan(BLOCKS, cluster(2), 32, constraints=PlanConstraints(num_stages=2, num_microbatches=count)).schedule
        for count in (2, 1)
    ]
    assert schedules == ["1f1b", "gpipe"]


def test_a_pinned_1f1b_has_a_microbatch_for_each_stage() -> None:
    slow_start = Profile((layer(fixed_s=1.0),) * 6, 2)
    counts = [
        best_plan(
            slow_start, cluster(4), 32, constraints=PlanConstraints(num_stages=4, schedule=schedule)
        ).num_microbatches
        for schedule in ("gpipe", "1f1b")
    ]
    assert counts[0] < counts[1] == 4


def test_microbatches_are_not_only_powers_of_two() -> None:
    profile = Profile((layer(fixed_s=0.02),) * 6, 2)
    assert best_plan(profile, cluster(2), 24, constraints=PlanConstraints(num_stages=2)).num_microbatches == 3


def test_of_equally_fast_plans_the_one_with_fewer_microbatches_is_taken() -> None:
    blocks = Profile((replace(layer(), activation_bytes=20 * MIB),) * 6, optimizer_state_factor=2)
    one_by_one = Plan(0, 0, ((0, 5),), num_replicas=1, num_microbatches=2)
    budget = max(device_memory_bytes(blocks, one_by_one, 2))  # in which two samples have no room at once
    saved_s = 0.01 * (2 + 5 * 3)  # what the second replica saves, and loses again to the exchange
    devices = Cluster(2, budget, Link(latency_s=0, bandwidth_bytes_per_s=60 * MIB / saved_s))
    found = best_plan(blocks, devices, 2, constraints=PlanConstraints(num_stages=1))
    assert (found.num_microbatches, found.num_replicas) == (1, 2)
    assert found.predicted_step_s == pytest.approx(step_seconds(blocks, devices, one_by_one, 2))


@pytest.mark.parametrize(
    "constraints",
    [
        {"num_stages": 3},
        {"num_replicas": 2},
        {"num_microbatches": 5},
        {"num_stages": 2, "schedule": "gpipe"},
        {"stages": ((0, 0), (1, 5))},
    ],
)
def test_what_is_fixed_stays_fixed(constraints: dict[str, Any]) -> None:
    plan = best_plan(BLOCKS, cluster(4), batch_size=32, constraints=PlanConstraints(**constraints))
    assert {name: getattr(plan, name) for name in constraints} == constraints


def test_fixed_stages_must_fit_the_memory_too() -> None:
    with pytest.raises(InfeasiblePlan, match=r"no plan fits device_memory_gib=0\.09766"):
        best_plan(BLOCKS, cluster(2, memory_mib=100), 4, constraints=PlanConstraints(stages=((0, 0), (1, 5))))


def wide(num_devices: int, memory_mib: float | None = None) -> Cluster:
    """Nodes of four with a slow network between them."""
    return replace(cluster(num_devices, memory_mib), node_link=Link(1e-4, 1e8), devices_per_node=4)


def test_chunks_shorten_the_wait_of_a_long_pipeline() -> None:
    plan = best_plan(
        Profile((layer(),) * 8, 2), cluster(4, bandwidth=1e12), 8, constraints=PlanConstraints(num_replicas=1)
    )
    assert plan.num_replicas == 1
    pinned = PlanConstraints(num_replicas=1, num_microbatches=4, num_stages=8)
    chunked = best_plan(Profile((layer(),) * 8, 2), cluster(4, bandwidth=1e12), 8, constraints=pinned)
    assert (chunked.schedule, chunked.stages_per_rank, chunked.pipeline_size) == ("interleaved1f1b", 2, 4)


def test_without_a_budget_nothing_is_checkpointed() -> None:
    assert not best_plan(BLOCKS, cluster(4), 32).recompute


def test_checkpointing_is_taken_where_nothing_else_fits() -> None:
    one_by_one = PlanConstraints(num_stages=1, num_replicas=1, num_microbatches=1)
    without = best_plan(BLOCKS, cluster(1), 8, constraints=one_by_one)
    needed = device_memory_bytes(BLOCKS, without, 8)[0]
    tight = replace(cluster(1), device_memory_bytes=needed - 1)
    found = best_plan(BLOCKS, tight, 8, constraints=one_by_one)
    assert found.recompute
    assert found.predicted_step_s > without.predicted_step_s
    with pytest.raises(InfeasiblePlan, match=r"no plan fits .* leave num_microbatches out, so that gradients"):
        best_plan(BLOCKS, tight, 8, constraints=replace(one_by_one, recompute=False))


def test_pipelines_stay_inside_a_node_where_they_hand_over_much() -> None:
    heavy_outputs = Profile(tuple(replace(layer(parameter_mib=1), output_bytes=64 * MIB) for _ in range(6)), 2)
    heavy_weights = Profile(tuple(replace(layer(parameter_mib=400), output_bytes=1) for _ in range(6)), 2)
    constraints = PlanConstraints(num_stages=2, num_replicas=4, num_microbatches=2)
    plans = [best_plan(profile, wide(8), 32, constraints=constraints) for profile in (heavy_outputs, heavy_weights)]
    assert [plan.rank_order for plan in plans] == ["pipeline-first", "replica-first"]


def test_one_node_has_its_pipelines_one_after_the_other() -> None:
    plan = best_plan(BLOCKS, cluster(8), 32, constraints=PlanConstraints(num_stages=2))
    assert plan.rank_order == "pipeline-first"


@pytest.mark.parametrize("node_bandwidth", [1e9, 1e8, 1e7, 1e5])
def test_thousands_of_devices_look_at_few_partitions(monkeypatch: pytest.MonkeyPatch, node_bandwidth: float) -> None:
    looks, bounds = (
        counted(monkeypatch, "fastest", PartitionSolver),
        counted(monkeypatch, "pipeline_makespan", LowerBounds),
    )
    devices = replace(THOUSANDS, device_memory_bytes=300 * MIB, node_link=Link(1e-5, node_bandwidth))
    assert best_plan(LONG, devices, batch_size=4096).num_devices > 2048
    assert len(looks) < 30, "of about 100,000 layouts"
    assert len(bounds) < 8_000


def test_that_nothing_fits_thousands_of_devices_is_told_after_few_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, bounds = (
        counted(monkeypatch, "min_memory", PartitionSolver),
        counted(monkeypatch, "device_bytes", LowerBounds),
    )
    with pytest.raises(
        InfeasiblePlan, match="with num_stages=26, num_replicas=152, activation checkpointing and num_microbatches=27"
    ):
        best_plan(LONG, replace(THOUSANDS, device_memory_bytes=10 * MIB), batch_size=4096)
    assert len(looks) < 30, "of about 100,000 layouts"
    assert len(bounds) < 10_000


LONG = Profile((layer(fixed_s=1e-3),) * 26, 2)
THOUSANDS = replace(wide(4096), devices_per_node=8)


def counted(monkeypatch: pytest.MonkeyPatch, method: str, of: type) -> list[Layout]:
    """The layouts that a method is called with from now on."""
    layouts, original = list[Layout](), getattr(of, method)

    def counting(self: object, layout: Layout, *limits: float) -> object:
        layouts.append(layout)
        return original(self, layout, *limits)

    monkeypatch.setattr(of, method, counting)
    return layouts


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        ((5, 0), "num_frozen=5 is none of 0 to 4"),
        ((-1, 0), "num_frozen=-1 is none of 0 to 4"),
        ((2, 3), "cache_level=3 is none of 0 to 2"),
        ((2, -1), "cache_level=-1 is none of 0 to 2"),
    ],
)
def test_a_frozen_prefix_that_cannot_be_is_refused_in_a_line(frozen: tuple[int, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        best_plan(BLOCKS, cluster(2), 8, *frozen)

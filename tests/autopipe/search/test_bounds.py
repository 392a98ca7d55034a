from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.constraints import UNCONSTRAINED
from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.plan import DeviceLayout, Layout, Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.autopipe.search.bounds import LoadBounds, LowerBounds
from pipetransformer.autopipe.search.candidates import (
    candidates,
    device_layouts,
    microbatch_counts,
    smallest_candidates,
)
from pipetransformer.autopipe.search.solver import PartitionSolver

ROUNDING = 1 + 1e-9


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_no_deal_keeps_all_devices_below_the_bound(weights: list[int], num_devices: int) -> None:
    deals = product(range(num_devices), repeat=len(weights))
    loads = (
        [sum(w for w, at in zip(weights, deal, strict=True) if at == d) for d in range(num_devices)] for deal in deals
    )
    assert LoadBounds(weights).largest(num_devices) <= min(max(load) for load in loads) + 1e-9


def test_seven_equal_layers_on_two_devices_are_four_on_one() -> None:
    assert LoadBounds([1.0] * 7).largest(2) == 4


TIMES = st.builds(AffineTime, st.sampled_from([0.0, 0.01]), st.floats(0.001, 0.05))
SIZES = st.sampled_from([0, 1 << 20, 5 << 20])
LAYERS = st.builds(
    LayerProfile, st.just("layer"), TIMES, TIMES, TIMES, st.floats(0, 0.01), SIZES, SIZES, SIZES.filter(bool)
)
PROFILES = st.builds(
    Profile,
    layers=st.lists(LAYERS, min_size=2, max_size=5).map(tuple),
    optimizer_state_factor=st.just(2.0),
    cache_miss_rate=st.sampled_from([0.0, 0.5]),
    schedule_overhead_s=st.sampled_from([0.0, 0.05]),
)
LEVELS = st.sampled_from([(0, 0), (1, 0), (1, 1)])  # frozen and cached
LINKS = st.sampled_from([Link(1e-2, 1e6), Link(1e-5, 1e8), Link(1e-5, 1e11)])
CLUSTERS = st.builds(Cluster, st.integers(1, 8), st.none(), LINKS, st.none() | LINKS, st.sampled_from([2, 3, 4]))


def plans(solver: PartitionSolver, layout: Layout) -> Iterator[Plan]:
    """All partitions of a layout."""
    first, end = solver.layers.start, solver.layers.stop
    for cuts in combinations(range(first + 1, end), layout.num_stages - 1):
        stages = tuple((start, end - 1) for start, end in pairwise([first, *cuts, end]))
        yield Plan.laid_out(layout, solver.num_frozen, solver.cache_level, stages)


@settings(max_examples=60, deadline=None)
@given(PROFILES, CLUSTERS, st.integers(1, 9), LEVELS, st.data())
def test_no_bound_cuts_off_the_fastest_partition_of_a_candidate(
    profile: Profile, cluster: Cluster, batch_size: int, levels: tuple[int, int], data: st.DataObject
) -> None:
    num_frozen, cache_level = (min(level, len(profile.layers) - 2) for level in levels)
    solver = PartitionSolver(profile, cluster, batch_size, num_frozen, cache_level, None)
    bounds, num_layers = LowerBounds(solver), len(solver.layers)
    devices = data.draw(st.sampled_from(list(device_layouts(cluster, num_layers, batch_size, UNCONSTRAINED))))
    update_s = bounds.update_seconds(devices)
    counts = microbatch_counts(batch_size, devices, None)
    least_s = bounds.devices_seconds(devices, counts, UNCONSTRAINED.most_stages_per_rank)
    assert bounds.work_seconds(devices) <= least_s * ROUNDING
    for layout in candidates(devices, num_layers, batch_size, UNCONSTRAINED, may_recompute=True):
        fastest_s = min(step_seconds(profile, cluster, plan, batch_size) for plan in plans(solver, layout)) * ROUNDING
        assert least_s <= fastest_s
        assert bounds.pipeline_makespan(layout) + update_s <= fastest_s
        assert bounds.frozen_below_seconds(layout) <= fastest_s


def test_a_pipeline_over_a_slow_link_is_no_faster_than_the_device_that_hands_over() -> None:
    time = AffineTime(0.0, 1.0)
    layer = LayerProfile("layer", time, time, time, 0.0, 0, 0, output_bytes=1)
    slow, fast = (Cluster(4, None, Link(0, 1e9), Link(far_s, 1e9), devices_per_node=1) for far_s in (100, 0))
    seconds = [
        LowerBounds(PartitionSolver(Profile((layer,) * 8, 2), cluster, 4, 0, 0, None)).devices_seconds(
            DeviceLayout(2, 1), counts=[1], stages_per_rank=1
        )
        for cluster in (slow, fast)
    ]
    # 4 samples with 8 layers of 3 s, less a gradient below the first, one device after the other; and 2 messages
    assert seconds == [pytest.approx(2 * 100 + 4 * 23), pytest.approx(4 * 23)]


def test_frozen_stages_send_once_and_the_slowest_of_the_others_twice() -> None:
    time = AffineTime(0.0, 1.0)
    layer = LayerProfile("layer", time, time, time, 0.0, 0, 0, output_bytes=1)
    solver = PartitionSolver(Profile((layer,) * 6, 2), Cluster(5, None, Link(100, 1e9)), 2, 2, 0, None)
    layout = Layout(5, 1, 2, "gpipe")
    # 3 frozen layers of 1 s each, active ones of 2, 3 and 3 s; 2 of 5 stages have active layers, and one of them sends:
    # up and back again, after its lightest layer
    found_s = LowerBounds(solver).frozen_below_seconds(layout)
    assert found_s == pytest.approx(3 + 8 + 3 * 100 + 2 * 100 + (2 * 100 + 2))
    fastest_s = min(step_seconds(solver.profile, solver.cluster, plan, 2) for plan in plans(solver, layout))
    assert found_s == pytest.approx(fastest_s)


@settings(max_examples=60, deadline=None)
@given(PROFILES, CLUSTERS, st.integers(1, 12), LEVELS)
def test_one_of_the_lean_candidates_takes_least_memory(
    profile: Profile, cluster: Cluster, batch_size: int, levels: tuple[int, int]
) -> None:
    num_frozen, cache_level = (min(level, len(profile.layers) - 2) for level in levels)
    solver = PartitionSolver(profile, cluster, batch_size, num_frozen, cache_level, None)
    num_layers = len(solver.layers)

    def least(of: list[Layout]) -> int:
        return min(
            max(device_memory_bytes(profile, plan, batch_size)) for layout in of for plan in plans(solver, layout)
        )

    every = [
        layout
        for devices in device_layouts(cluster, num_layers, batch_size, UNCONSTRAINED)
        for layout in candidates(devices, num_layers, batch_size, UNCONSTRAINED, may_recompute=True)
    ]
    lean = list(smallest_candidates(cluster, num_layers, batch_size, UNCONSTRAINED))
    assert set(lean) <= set(every)
    assert least(lean) == least(every)

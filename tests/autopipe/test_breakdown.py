"""The parts of a step are the step, and each of them comes from what it is named after."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autopipe.breakdown import StepParts, step_parts
from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.correction import TimedPlan
from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.limit import pipeline_efficiency
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import (
    AffineTime,
    LayerProfile,
    LayerShard,
    MeshProfile,
    Profile,
    Traffic,
    Volume,
)
from pipetransformer.mesh import StageMesh

FORWARD, DATA, WEIGHT = 1.0, 10.0, 100.0  # seconds of a layer's passes per sample
LAYER = LayerProfile("block", *(AffineTime(0, s) for s in (FORWARD, DATA, WEIGHT)), 0.5, 1000, 7, 3)
PROFILE = Profile((LAYER,) * 4, optimizer_state_factor=2)
FREE, SLOW = Link(0, float("inf")), Link(latency_s=0.25, bandwidth_bytes_per_s=4)
MESH = StageMesh(tp=2)


def cluster(num_devices: int, link: Link = FREE) -> Cluster:
    return Cluster(num_devices, None, link)


def nonzero(parts: StepParts) -> dict[str, float]:
    return {name: pytest.approx(seconds) for name, seconds in parts._asdict().items() if abs(seconds) > 1e-9}


@st.composite
def settings(draw: st.DrawFn) -> tuple[Profile, Cluster, Plan, int]:
    """Draws layers that differ, and any plan of them: in stages, frozen, cached, sharded, on a mesh, in chunks."""
    seconds = st.floats(0, 2)
    times = st.builds(AffineTime, seconds, seconds)
    layers = st.builds(LayerProfile, st.just("layer"), times, times, times, seconds, *(st.integers(0, 99),) * 3)
    profile = Profile(
        tuple(draw(layers) for _ in range(6)),
        2,
        cache_read_s_per_byte=draw(seconds),
        cache_miss_rate=draw(st.sampled_from([0.0, 0.3])),
        fill_read_s=draw(seconds),
        schedule_overhead_s=draw(seconds),
        sharding_overhead_s=draw(seconds),
        sharding_s_per_byte=draw(seconds),
        step_overhead_s=draw(seconds),
        waiting_s=draw(seconds),
        read=draw(times),
        read_besides=draw(times),
        contention=draw(st.sampled_from([1.0, 1.5])),
        host_copy_s_per_byte=draw(seconds),
        meshes=(MeshProfile(MESH, tuple(shard(draw) for _ in range(6)), draw(times)),),
    )
    num_frozen = draw(st.integers(0, 4))
    level = draw(st.sampled_from([0, num_frozen]))
    first = level + 1 if level else 0
    cut = draw(st.integers(first, 5))
    stages = ((first, 5),) if cut == 5 else ((first, cut), (cut + 1, 5))
    kinds = [{}, {"recompute": True}, {"mesh": MESH}]
    kinds += [{"fsdp": True}, {"recompute": True, "chunk_bytes": 10_000}] * (len(stages) == 1)
    own = draw(st.sampled_from(kinds))
    plan = Plan(num_frozen, level, stages, draw(st.integers(1, 2)), draw(st.integers(2, 4)), **own)
    num_devices = plan.num_devices * draw(st.integers(1, 2))
    return profile, cluster(num_devices, Link(0.1, 50.0)), plan, draw(st.integers(1, 20))


def shard(draw: st.DrawFn) -> LayerShard:
    seconds, sizes = st.floats(0, 2), st.integers(1, 99)
    times = st.builds(AffineTime, seconds, seconds)
    layer = draw(st.builds(LayerProfile, st.just("part"), times, times, times, seconds, sizes, sizes, sizes))
    traffic = Traffic(Volume(draw(st.integers(0, 3)), 0.0, draw(seconds)))
    return LayerShard(layer, traffic, traffic, Traffic(), traffic, ((2, draw(sizes)),))


@given(settings())
def test_the_parts_are_the_step_and_none_is_negative(drawn: tuple[Profile, Cluster, Plan, int]) -> None:
    parts = step_parts(*drawn)
    assert sum(parts) == pytest.approx(step_seconds(*drawn), rel=1e-9, abs=1e-9)
    assert min(parts) >= -1e-9 * max(1.0, sum(parts)), parts


def test_one_device_that_launches_for_nothing_only_works_and_updates() -> None:
    parts = step_parts(PROFILE, cluster(1), Plan(0, 0, ((0, 3),), 1, 2), batch_size=6)
    assert nonzero(parts) == {"active": 6 * (4 * (FORWARD + WEIGHT) + 3 * DATA), "optimizer": 4 * 0.5}


def test_a_balanced_pipeline_waits_as_long_as_its_schedule_says() -> None:
    even = replace(PROFILE, layers=(replace(LAYER, input_grad=AffineTime(0, 0)),) * 4)
    parts = step_parts(even, cluster(2), Plan(0, 0, ((0, 1), (2, 3)), 1, 4), batch_size=4)
    assert parts.active / (parts.active + parts.wait) == pytest.approx(pipeline_efficiency(2, 4))


def test_a_device_without_a_stage_waits() -> None:
    parts = step_parts(PROFILE, cluster(2), Plan(0, 0, ((0, 3),), 1, 1), batch_size=1)
    assert parts.wait == pytest.approx(parts.active)


def test_frozen_layers_run_unless_their_output_is_read() -> None:
    profile = replace(PROFILE, cache_read_s_per_byte=0.1)
    computed = step_parts(profile, cluster(1), Plan(2, 0, ((0, 3),), 1, 1), batch_size=2)
    read = step_parts(profile, cluster(1), Plan(2, 2, ((3, 3),), 1, 1), batch_size=2)
    assert nonzero(computed) == {"active": 2 * (FORWARD + WEIGHT), "frozen": 2 * 3 * FORWARD, "optimizer": 0.5}
    assert nonzero(read) == {"active": 2 * (FORWARD + WEIGHT), "cache": 2 * 0.1 * 3, "optimizer": 0.5}


def test_what_the_cache_misses_counts_as_its_time() -> None:
    profile = replace(PROFILE, cache_miss_rate=0.5, fill_read_s=0.25)
    missed = step_parts(profile, cluster(1), Plan(2, 2, ((3, 3),), 1, 1), batch_size=4)
    assert nonzero(missed) == {"active": 4 * (FORWARD + WEIGHT), "cache": 2 * (0.25 + 3 * FORWARD), "optimizer": 0.5}


def test_each_microbatch_launches_its_layers_and_pads_its_rows() -> None:
    profile = replace(PROFILE, layers=(replace(LAYER, forward=AffineTime(2, FORWARD)),) * 4)
    launches = step_parts(profile, cluster(1), Plan(0, 0, ((0, 3),), 1, 3), batch_size=6).launch
    padded = step_parts(PROFILE, cluster(1), Plan(0, 0, ((0, 3),), 1, 2), batch_size=5).launch
    assert launches == pytest.approx(3 * 4 * 2)
    assert padded == pytest.approx(4 * (FORWARD + WEIGHT) + 3 * DATA), "three rows twice for five samples"


def test_checkpointing_computes_the_active_layers_again() -> None:
    parts = step_parts(PROFILE, cluster(1), Plan(1, 0, ((0, 3),), 1, 1, recompute=True), batch_size=3)
    assert parts.recompute == pytest.approx(3 * 2 * FORWARD)


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (Plan(0, 0, ((0, 1), (2, 3)), 1, 1), {"transfer": 2 * (0.25 + 3 * 4 / 4)}),
        (Plan(0, 0, ((0, 3),), 2, 1), {"all_reduce": 0.25 + 4 * 1000 / 4}),
        (Plan(0, 0, ((0, 3),), 2, 1, fsdp=True), {"transfer": 4 * 3 * (0.25 + 1000 / 4) / 2}),
    ],
)
def test_what_crosses_a_link_counts_as_what_it_is_for(plan: Plan, named: dict[str, float]) -> None:
    slow, free = (step_parts(PROFILE, cluster(2, link), plan, batch_size=4)._asdict() for link in (SLOW, FREE))
    more = {name: seconds - free[name] for name, seconds in slow.items() if seconds != pytest.approx(free[name])}
    assert more == {name: pytest.approx(seconds) for name, seconds in named.items()}


def test_what_a_mesh_exchanges_is_no_work() -> None:
    part = replace(LAYER, forward=AffineTime(0, FORWARD / 2))
    traffic = Traffic(Volume(2, 0.0, 4.0))
    known = MeshProfile(MESH, (LayerShard(part, traffic, Traffic(), Traffic(), Traffic()),) * 4)
    plan = Plan(3, 0, ((0, 3),), 1, 1, mesh=MESH)
    parts = step_parts(replace(PROFILE, meshes=(known,)), cluster(2, SLOW), plan, batch_size=1)
    assert parts.frozen == pytest.approx(4 * FORWARD / 2)
    assert parts.transfer == pytest.approx(4 * (2 * 0.25 + 4 / 4))


def test_what_chunks_fetch_is_a_transfer() -> None:
    profile = replace(PROFILE, host_copy_s_per_byte=0.001)
    plain = Plan(0, 0, ((0, 3),), 1, 1, recompute=True)
    plans = plain, replace(plain, chunk_bytes=9000)
    one, other = (step_parts(profile, cluster(1), plan, 1) for plan in plans)
    assert (one.transfer, other.transfer) == (0, pytest.approx(4 * (2 * 1.0 + 1.0)))
    assert one.launch == other.launch == 0


def test_what_steps_have_shown_is_no_part() -> None:
    plan = Plan(0, 0, ((0, 3),), 1, 1)
    slower = PROFILE.with_timed(TimedPlan("single", 0, 0, 1.0, 3.0))
    assert step_parts(slower, cluster(1), plan, 2) == step_parts(PROFILE, cluster(1), plan, 2)


def test_what_no_plan_changes_is_fixed() -> None:
    profile = replace(PROFILE, step_overhead_s=0.3, read=AffineTime(0.1, 0.2))
    assert step_parts(profile, cluster(1), Plan(0, 0, ((0, 3),), 1, 2), 4).fixed == pytest.approx(0.3 + 0.1 + 4 * 0.2)

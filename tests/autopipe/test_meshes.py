"""A mesh makes larger devices: plans on it are found, predicted and refused as all others are."""

from dataclasses import replace

import pytest

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.correction import TimedPlan
from pipetransformer.autopipe.cost import kind_of_plan, missed_seconds, step_scale, step_seconds
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.meshes import mesh_batch_size, mesh_candidates, on_mesh
from pipetransformer.autopipe.plan import DeviceLayout, Plan
from pipetransformer.autopipe.profile import (
    AffineTime,
    LayerProfile,
    LayerShard,
    MeshProfile,
    Profile,
    Traffic,
    Volume,
)
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.errors import InfeasiblePlan
from pipetransformer.mesh import SINGLE, StageMesh

TP, ROWS, CUBE = StageMesh(tp=2), StageMesh(dp_shard=2), StageMesh(dp_shard=2, tp=2, algorithm="3d")
WEIGHTS, OUTPUT, NUM_BLOCKS = 8_000_000, 100_000, 4
CHEAP, DEAR = Volume(2, 0.0, 100_000.0), Volume(2, 0.0, 20_000_000.0)


def layer(parts: int = 1, rows: int = 1) -> LayerProfile:
    """A layer of 10 ms per sample, in parts."""
    work = AffineTime(0.0, 0.010 / parts)
    return LayerProfile("layer", work, work, work, 0.004 / parts, WEIGHTS // parts, OUTPUT // rows, OUTPUT)


def shard(mesh: StageMesh, volume: Volume) -> LayerShard:
    split = mesh.num_ranks // mesh.batch_ways
    traffic = Traffic(volume)
    one = replace(layer(split), parameter_bytes=WEIGHTS // (mesh.tp * mesh.dp_shard))
    return LayerShard(one, traffic, traffic, Traffic(), traffic, ((2, 1_000_000),))


def profile(mesh: StageMesh = TP, volume: Volume = CHEAP) -> Profile:
    num_layers = NUM_BLOCKS + 2
    shards = MeshProfile(mesh, (shard(mesh, volume),) * num_layers)
    return Profile((layer(),) * num_layers, optimizer_state_factor=2.0, meshes=(shards,))


def cluster(num_devices: int, bandwidth: float = 1e10, per_node: int | None = None) -> Cluster:
    link = Link(1e-5, bandwidth)
    return Cluster(num_devices, None, link, node_link=Link(1e-4, 1e8) if per_node else None, devices_per_node=per_node)


def planned(
    meshes: tuple[StageMesh, ...],
    num_devices: int = 2,
    batch_size: int = 1,
    bandwidth: float = 1e10,
    known: Profile | None = None,
) -> Plan:
    constraints = PlanConstraints(meshes=meshes)
    return best_plan(known or profile(), cluster(num_devices, bandwidth), batch_size, constraints=constraints)


def test_a_mesh_is_taken_where_a_batch_has_fewer_samples_than_devices() -> None:
    plan = planned((SINGLE, TP))
    assert (plan.mesh, plan.num_replicas, plan.num_devices) == (TP, 1, 2)
    assert plan.predicted_step_s < 0.6 * planned((SINGLE,)).predicted_step_s


def test_a_mesh_is_not_taken_where_its_exchanges_cost_more_than_it_saves() -> None:
    assert planned((SINGLE, TP), bandwidth=1e6).mesh == SINGLE


@pytest.mark.parametrize("mesh", [TP, CUBE])
def test_what_the_cache_lacks_runs_through_whole_layers_of_all_rows_that_a_rank_reads(mesh: StageMesh) -> None:
    known = replace(profile(mesh), cache_miss_rate=0.5)
    alone, together = (
        missed_seconds(each, 2, num_rows=6) - missed_seconds(each, 2, num_rows=0)
        for each in (known, on_mesh(known, cluster(8), mesh)[0])
    )
    assert together == pytest.approx(mesh.rows_multiple * alone)


def test_replicas_are_taken_where_the_batch_is_large() -> None:
    plan = planned((SINGLE, TP), batch_size=64, known=profile(volume=DEAR))
    assert (plan.mesh, plan.num_replicas) == (SINGLE, 2)


def test_a_mesh_that_is_asked_for_is_taken_whatever_it_costs() -> None:
    assert planned((TP,), bandwidth=1e6).mesh == TP


def test_the_seconds_of_a_plan_are_those_that_the_search_has_found() -> None:
    plan = planned((TP,), num_devices=8, batch_size=16)
    assert plan.num_replicas * plan.pipeline_size <= 4
    assert step_seconds(profile(), cluster(8), plan, 16) == pytest.approx(plan.predicted_step_s)


def test_the_passes_of_a_part_and_its_exchanges_are_one_line_in_the_samples() -> None:
    known, units = on_mesh(profile(), cluster(8, bandwidth=1e8), TP)
    forward = known.layers[1].forward
    assert forward.fixed_s == pytest.approx(2 * 1e-5)
    assert forward.per_sample_s == pytest.approx(0.005 + 100_000 / 1e8)
    assert known.layers[1].optimizer_s == pytest.approx(0.002 + 1_000_000 / 1e8)  # and the sum over two copies
    assert units.num_devices == 4


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [(None, (1e-5, 0.0)), (AffineTime(1e-6, 0.0), (1e-5, 0.0)), (AffineTime(2e-3, 1e-4), (2e-3, 1e-4))],
    ids=["only the link is known", "shorter than the link", "longer"],
)
def test_an_exchange_in_a_step_is_no_shorter_than_the_link_and_may_be_longer(
    exchange: AffineTime | None, expected: tuple[float, float]
) -> None:
    (measured,) = profile().meshes
    known = replace(profile(), meshes=(measured._replace(exchange=exchange),))
    on_units, _ = on_mesh(known, cluster(8), TP)
    bytes_s = CHEAP.sample_bytes / cluster(8).link.bandwidth_bytes_per_s
    assert on_units.layers[1].forward.fixed_s == pytest.approx(2 * expected[0])
    assert on_units.layers[1].forward.per_sample_s == pytest.approx(0.005 + bytes_s + 2 * expected[1])
    assert on_units.step_overhead_s == pytest.approx(1e-5), "the sum over two copies, once in a step"


def test_the_lowest_block_that_trains_exchanges_what_its_own_backward_does() -> None:
    (measured,) = profile().meshes
    lowest = Traffic(Volume(1, 0.0, 50_000.0))
    shards = tuple(replace(each, lowest_grad=lowest) for each in measured.layers)
    known = replace(profile(), meshes=(measured._replace(layers=shards),))
    layer = on_mesh(known, cluster(8, bandwidth=1e8), TP)[0].layers[1]
    assert layer.backward_as_lowest.fixed_s == pytest.approx(1e-5)
    assert layer.backward_as_lowest.per_sample_s == pytest.approx(0.005 + 50_000 / 1e8)


@pytest.mark.parametrize(("num_busy", "expected"), [(1, 2 / 3), (2, 1.0)])
def test_ranks_that_are_busy_take_from_each_other_and_not_their_meshes(num_busy: int, expected: float) -> None:
    """Of four processes on a node two or four are busy, which take twice as long together as one alone."""
    known, units = on_mesh(replace(profile(), contention=2.0), cluster(4), TP)
    scale = step_scale(known, units, DeviceLayout(num_busy, 1), cache_level=0, batch_size=4)
    assert scale.factor == pytest.approx(expected)


def test_each_rank_of_a_mesh_reads_all_rows_of_a_sample_that_it_has_a_part_of() -> None:
    known = replace(profile(CUBE), read=AffineTime(1.0, 2.0), read_besides=AffineTime(0.5, 0.25), fill_read_s=3.0)
    on_units, _ = on_mesh(known, cluster(8), CUBE)
    assert CUBE.rows_multiple == 2
    assert (on_units.read, on_units.read_besides, on_units.fill_read_s) == (
        AffineTime(1.0, 4.0), AffineTime(0.5, 0.5), 6.0,
    )  # fmt: skip


def test_a_device_of_ranks_that_split_rows_sees_fewer_samples() -> None:
    assert [mesh_batch_size(10, mesh) for mesh in (SINGLE, TP, ROWS, CUBE)] == [10, 10, 5, 3]


def test_a_node_holds_fewer_devices_whose_ranks_share_what_leaves_it() -> None:
    _, units = on_mesh(profile(), cluster(16, per_node=8), TP)
    assert (units.num_devices, units.devices_per_node) == (8, 4)
    assert units.node_link == Link(1e-4, 1e8 / 2)


def test_a_mesh_over_nodes_takes_their_link() -> None:
    across, inside = (on_mesh(profile(), cluster(4, per_node=size), TP)[0] for size in (1, 2))
    assert across.layers[1].forward.fixed_s == pytest.approx(2e-4)
    assert inside.layers[1].forward.fixed_s == pytest.approx(2e-5)


def test_meshes_that_do_not_divide_a_node_take_its_link_too() -> None:
    links = [on_mesh(profile(), cluster(12, per_node=size), TP)[0].layers[1].forward.fixed_s for size in (3, 4)]
    assert links == [pytest.approx(2e-4), pytest.approx(2e-5)], "the second of each three devices is elsewhere"


def test_the_bytes_of_a_rank_are_those_of_its_part() -> None:
    plan = planned((TP,))
    (whole,), (part,) = (device_memory_bytes(profile(), replace(plan, mesh=mesh), 1) for mesh in (SINGLE, TP))
    assert part < 0.6 * whole


def test_a_model_that_fits_no_device_is_planned_on_a_mesh() -> None:
    limit = 4 * (WEIGHTS // 2) * (NUM_BLOCKS + 2) + 20 * OUTPUT
    small = replace(cluster(2), device_memory_bytes=limit)
    one_stage = PlanConstraints(num_stages=1, meshes=(SINGLE, TP))
    assert best_plan(profile(), small, 1, constraints=one_stage).mesh == TP
    with pytest.raises(InfeasiblePlan, match="no plan fits"):
        best_plan(profile(), small, 1, constraints=replace(one_stage, meshes=(SINGLE,)))


def test_more_ranks_than_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        InfeasiblePlan, match=r"a mesh of tp 2 takes 2 devices, and there are 1; lower tp, cp or dp_shard"
    ):
        planned((TP,), num_devices=1)


def test_a_refusal_on_a_mesh_of_rows_says_whose_batch_it_names() -> None:
    too_many = PlanConstraints(num_replicas=1, num_microbatches=3, meshes=(ROWS,))
    with pytest.raises(InfeasiblePlan, match=r"batch_size=2 .*\(with dp_shard 2, .* of the run over 2\)$"):
        best_plan(profile(ROWS), cluster(2), 4, constraints=too_many)
    with pytest.raises(InfeasiblePlan) as refused:
        best_plan(profile(ROWS), cluster(2), 2, constraints=replace(too_many, meshes=(SINGLE,)))
    assert "over 2" not in str(refused.value)


def test_first_steps_on_a_mesh_correct_later_predictions_for_meshes_alone() -> None:
    plan = planned((TP,))
    assert kind_of_plan(plan) == "mesh"
    slower = profile().with_timed(TimedPlan("mesh", 0, 0, plan.predicted_step_s, 2 * plan.predicted_step_s))
    assert step_seconds(slower, cluster(2), plan, 1) == pytest.approx(2 * plan.predicted_step_s, rel=0.05)
    alone = planned((SINGLE,), num_devices=1)
    assert step_seconds(slower, cluster(1), alone, 1) == pytest.approx(alone.predicted_step_s, rel=0.01)


WIDTHS = {"heads": 12, "width": 48}
OPEN = {"tp": None, "cp": 1, "dp_shard": 1}


@pytest.mark.parametrize(
    ("wanted", "tokens", "limited", "expected"),
    [
        (OPEN, 64, False, ["", "tp 2", "tp 4"]),  # 3 and 6 would reach into another node
        ({**OPEN, "cp": None}, 64, False, ["", "tp 2", "tp 4"]),
        ({"tp": 1, "cp": None, "dp_shard": 1}, 2048, False, ["", "cp 2", "cp 4", "cp 8"]),
        ({"tp": 1, "cp": 1, "dp_shard": None}, 64, False, [""]),
        ({"tp": 1, "cp": 1, "dp_shard": None}, 64, True, ["", "dp_shard 2", "dp_shard 4", "dp_shard 8"]),
        ({"tp": 2, "cp": 1, "dp_shard": 4}, 64, False, ["tp 2 x dp_shard 4"]),
    ],
)
def test_meshes_that_are_left_open_are_those_that_may_pay(
    wanted: dict[str, int | None], tokens: int, limited: bool, expected: list[str]
) -> None:
    assert [str(mesh) for mesh in mesh_candidates(wanted, SINGLE, WIDTHS, tokens, 8, limited)] == expected


def test_three_dimensions_leave_the_tokens_whole_where_their_parts_are_open() -> None:
    found = mesh_candidates({"tp": 2, "cp": None, "dp_shard": 1}, StageMesh(algorithm="3d"), WIDTHS, 2048, 8, False)
    assert [str(mesh) for mesh in found] == ["tp 2 (3d)"]


def test_a_mesh_that_does_not_divide_the_model_is_no_choice() -> None:
    found = mesh_candidates({"tp": 2, "cp": 1, "dp_shard": None}, SINGLE, {"heads": 4, "width": 12}, 64, 16, True)
    assert [str(mesh) for mesh in found] == ["tp 2", "tp 2 x dp_shard 2"]  # 2 x 4 and 2 x 8 do not divide 12


@pytest.mark.parametrize("wanted", [{"tp": 3, "cp": 1, "dp_shard": None}, {"tp": 16, "cp": None, "dp_shard": 1}])
def test_a_size_that_leaves_no_mesh_is_refused_by_its_name(wanted: dict[str, int | None]) -> None:
    with pytest.raises(InfeasiblePlan, match=rf"no mesh with tp={wanted['tp']}, .* divides the 8 devices of a node"):
        mesh_candidates(wanted, SINGLE, {"heads": 48, "width": 48}, 2048, 8, True)


def test_two_dimensions_are_for_those_who_ask_for_them() -> None:
    found = mesh_candidates({"tp": 2, "cp": 1, "dp_shard": 2}, StageMesh(algorithm="2d"), WIDTHS, 64, 8, False)
    assert [str(mesh) for mesh in found] == ["tp 2 x dp_shard 2 (2d)"]


@pytest.mark.parametrize(("num_replicas", "num_microbatches"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_the_search_and_the_report_count_the_same_bytes(num_replicas: int, num_microbatches: int) -> None:
    fixed = PlanConstraints(
        num_stages=1, num_replicas=num_replicas, num_microbatches=num_microbatches, recompute=False, meshes=(TP,)
    )

    def within(budget: int | None) -> Plan:
        devices = replace(cluster(2 * num_replicas), device_memory_bytes=budget)
        return best_plan(profile(), devices, 8, constraints=fixed)

    needed = max(device_memory_bytes(profile(), within(None), 8))
    assert within(needed).mesh == TP
    with pytest.raises(InfeasiblePlan):
        within(needed - 1)

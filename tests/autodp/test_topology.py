from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan, RankOrder

RANK_ORDERS = st.sampled_from(RankOrder.__args__)


def plan(
    num_devices: int, num_replicas: int, stages_per_rank: int = 1, rank_order: RankOrder = "pipeline-first"
) -> Plan:
    stages = tuple((stage, stage) for stage in range(num_devices * stages_per_rank))
    return Plan(0, 0, stages, num_replicas, 1, "interleaved1f1b", stages_per_rank, rank_order=rank_order)


def test_pipeline_first_keeps_a_pipeline_together() -> None:
    topology = Topology(plan(3, 2), rank=4)
    assert topology.mesh_shape == {"dp": 2, "pp": 3}
    assert topology.coordinates == {"dp": 1, "pp": 1}
    assert (topology.pipeline_ranks, topology.replica_ranks) == ((3, 4, 5), (1, 4))


def test_replica_first_keeps_the_holders_of_a_layer_together() -> None:
    topology = Topology(plan(3, 2, rank_order="replica-first"), rank=3)
    assert list(topology.mesh_shape.items()) == [("pp", 3), ("dp", 2)]
    assert topology.coordinates == {"dp": 1, "pp": 1}
    assert (topology.pipeline_ranks, topology.replica_ranks) == ((1, 3, 5), (2, 3))


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 0)), (2, (0, 2)), (4, (1, 1)), (6, None), (7, None)])
def test_ranks_beyond_the_plan_are_idle(rank: int, expected: tuple[int, int] | None) -> None:
    topology = Topology(plan(3, 2), rank)
    assert topology.coordinates == (expected and {"dp": expected[0], "pp": expected[1]})
    assert topology.is_idle == (expected is None)
    assert (topology.stages is None, topology.layers == []) == (topology.is_idle, topology.is_idle)


def test_the_first_device_reads_samples_and_the_last_has_the_head() -> None:
    every = [Topology(plan(3, 2, stages_per_rank=2), rank) for rank in range(8)]
    assert [topology.rank for topology in every if topology.is_first] == [0, 3] == list(every[7].reading_ranks)
    assert [topology.rank for topology in every if topology.is_last] == [2, 5]
    assert [topology.stages for topology in every[:3]] == [range(0, 6, 3), range(1, 6, 3), range(2, 6, 3)]
    assert every[5].layers == [2, 5]


@pytest.mark.parametrize(
    ("rank_order", "layers", "expected"),
    [
        ("pipeline-first", (0, 5), (3, 5)),
        ("pipeline-first", (1, 4), (4,)),
        ("replica-first", (0, 5), (1, 5)),
        ("pipeline-first", (0, 3), (3,)),
    ],
)
def test_the_holders_of_layers_are_the_devices_that_run_one_of_them(
    rank_order: RankOrder, layers: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    two_each = plan(3, 2, stages_per_rank=2, rank_order=rank_order)
    assert Topology(two_each, rank=0).holders(layers, replica=1) == expected
    assert Topology(two_each, expected[0]).holders(layers) == expected


def test_groups_come_in_one_order_on_every_rank() -> None:
    groups = [(0, 1, 2), (3, 4, 5), (0, 3), (1, 4), (2, 5)]
    assert [list(Topology(plan(3, 2), rank).all_groups()) for rank in (0, 5, 7)] == [groups] * 3


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), RANK_ORDERS)
def test_every_rank_is_in_its_groups_at_its_coordinates(
    num_devices: int, num_replicas: int, stages_per_rank: int, rank_order: RankOrder
) -> None:
    laid_out = plan(num_devices, num_replicas, stages_per_rank, rank_order)
    every = [Topology(laid_out, rank) for rank in range(laid_out.num_devices)]
    assert {(t.replica, t.device) for t in every} == set(product(range(num_replicas), range(num_devices)))
    for topology in every:
        assert topology.pipeline_ranks[topology.device] == topology.rank
        assert topology.replica_ranks[topology.replica] == topology.rank
        assert {topology.pipeline_ranks, topology.replica_ranks} <= set(topology.all_groups())
        assert topology.stages is not None
        assert all(topology.replicas_of(stage) == topology.replica_ranks for stage in topology.stages)


@given(st.integers(1, 8), st.integers(1, 3))
def test_the_devices_of_a_pipeline_share_its_layers(num_devices: int, stages_per_rank: int) -> None:
    laid_out = plan(num_devices, 1, stages_per_rank)
    held = [layer for device in range(num_devices) for layer in laid_out.device_layers(device)]
    assert sorted(held) == list(range(num_devices * stages_per_rank))
    assert laid_out.device_layers(num_devices - 1)[-1] == laid_out.num_layers - 1, "the head is on the last"

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.cluster import Cluster, Link, allreduce_links, boundary_links
from pipetransformer.autopipe.plan import DeviceLayout, Plan, RankOrder
from pipetransformer.errors import UserError

RANK_ORDERS = st.sampled_from(RankOrder.__args__)
NEAR, FAR = Link(0, 1e9), Link(1, 1e6)


def nodes_of(size: int, num_devices: int = 64) -> Cluster:
    return Cluster(num_devices, None, NEAR, FAR, size)


def laid_out(pipeline_size: int, num_replicas: int, rank_order: RankOrder) -> Plan:
    stages = tuple((layer, layer) for layer in range(pipeline_size))
    return Plan(0, 0, stages, num_replicas, 1, "gpipe", rank_order=rank_order)


def test_a_message_takes_latency_and_bandwidth() -> None:
    link = Link(latency_s=0.5, bandwidth_bytes_per_s=10)
    assert link.seconds(20) == 2.5
    assert link.shared(4).seconds(20) == 8.5


@pytest.mark.parametrize(
    "cluster", [Cluster(8, None, NEAR), Cluster(8, None, NEAR, None, 4), Cluster(8, None, NEAR, FAR, 8)]
)
def test_one_node_has_one_link(cluster: Cluster) -> None:
    assert cluster.node_size is None
    assert set(boundary_links(cluster, DeviceLayout(4, 2)) + allreduce_links(cluster, DeviceLayout(4, 2))) == {NEAR}


def test_a_node_without_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="devices_per_node=0 must be at least 1"):
        nodes_of(0)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 9), RANK_ORDERS)
def test_a_boundary_takes_the_node_link_where_neighbours_of_any_replica_are_on_two_nodes(
    pipeline_size: int, num_replicas: int, size: int, rank_order: RankOrder
) -> None:
    plan = laid_out(pipeline_size, num_replicas, rank_order)
    links = boundary_links(nodes_of(size), plan.devices)
    for device in range(pipeline_size):
        nodes = [
            [rank // size for rank in Topology(plan, 0).ranks_along("pp", {"dp": replica})]
            for replica in range(num_replicas)
        ]
        crosses = any(row[device] != row[(device + 1) % pipeline_size] for row in nodes)
        assert (links[device] == NEAR) != crosses


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 9), RANK_ORDERS)
def test_a_ring_shares_the_node_link_with_those_that_leave_the_same_node(
    pipeline_size: int, num_replicas: int, size: int, rank_order: RankOrder
) -> None:
    plan = laid_out(pipeline_size, num_replicas, rank_order)
    rings = [{rank // size for rank in Topology(plan, 0).replicas_of(device)} for device in range(pipeline_size)]
    leaving = [ring for ring in rings if len(ring) > 1]
    most = max((sum(node in ring for ring in leaving) for node in set().union(*rings)), default=0)
    for ring, link in zip(rings, allreduce_links(nodes_of(size), plan.devices), strict=True):
        if len(ring) == 1:
            assert link == NEAR
        elif rank_order == "replica-first":  # a bound: at most two rings meet in a node
            assert link in (FAR, FAR.shared(2))
            assert link.bandwidth_bytes_per_s <= FAR.shared(most).bandwidth_bytes_per_s
        else:
            assert link == FAR.shared(most)


def test_replica_first_pipelines_leave_a_node_together() -> None:
    assert boundary_links(nodes_of(4), DeviceLayout(2, 4, "replica-first"))[0] == FAR.shared(4)


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan")])
def test_a_link_that_sends_nothing_is_refused(bandwidth: float) -> None:
    with pytest.raises(UserError, match=r"^bandwidth_bytes_per_s=.* must be above 0$"):
        Link(0.1, bandwidth)

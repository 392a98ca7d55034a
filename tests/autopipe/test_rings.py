"""An all-reduce goes by what was measured of all-reduces, a boundary by what was measured of messages."""

from pipetransformer.autopipe.cluster import Cluster, Link, allreduce_links, boundary_links
from pipetransformer.autopipe.plan import DeviceLayout

LINK, NODE_LINK, RING, NODE_RING = (Link(latency_s, 1e9) for latency_s in (1.0, 2.0, 3.0, 4.0))
NODES = Cluster(4, None, LINK, NODE_LINK, 2, RING, NODE_RING)
GRID, REPLICA_FIRST = DeviceLayout(2, 2), DeviceLayout(2, 2, "replica-first")


def test_pipelines_inside_a_node_average_their_gradients_between_nodes() -> None:
    assert boundary_links(NODES, GRID) == (LINK, LINK)
    assert allreduce_links(NODES, GRID) == (NODE_RING.shared(2),) * 2


def test_replicas_inside_a_node_pass_activations_between_nodes() -> None:
    assert boundary_links(NODES, REPLICA_FIRST)[0] == NODE_LINK.shared(2)
    assert allreduce_links(NODES, REPLICA_FIRST) == (RING, RING)


def test_messages_stand_for_all_reduces_that_were_not_measured() -> None:
    assert allreduce_links(Cluster(4, None, LINK, NODE_LINK, 2), GRID) == (NODE_LINK.shared(2),) * 2
    assert allreduce_links(Cluster(4, None, LINK), GRID) == (LINK, LINK)

import pytest

from pipetransformer.autodp.cost import transfer_seconds
from pipetransformer.autodp.moves import Move
from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.cost import AffineTime, LayerProfile, Profile

ZERO = AffineTime(0.0, 0.0)
PROFILE = Profile((LayerProfile("block", ZERO, ZERO, ZERO, 0.0, 100, 0, 0),) * 6, optimizer_state_factor=2.0)
NODE = Cluster(4, None, Link(0.0, 100.0))
NODES = Cluster(4, None, Link(0.0, 100.0), node_link=Link(0.0, 10.0), devices_per_node=2)


def seconds(*moves: tuple[int, int, int], cluster: Cluster = NODE, num_frozen: int = 0) -> float:
    return transfer_seconds([Move(*move) for move in moves], PROFILE, cluster, num_frozen)


def test_nothing_to_move_takes_no_time() -> None:
    assert seconds() == 0


def test_active_layers_bring_their_optimizer_state_and_frozen_ones_do_not() -> None:
    assert seconds((3, 0, 1)) == pytest.approx(3)
    assert seconds((3, 0, 1), num_frozen=3) == pytest.approx(1)


def test_ranks_send_and_receive_at_once_and_the_busiest_counts() -> None:
    assert seconds((1, 0, 1), (2, 1, 0), (3, 2, 3)) == pytest.approx(3)
    assert seconds((1, 0, 1), (2, 0, 2)) == pytest.approx(6)


def test_the_devices_of_a_node_share_its_link() -> None:
    assert seconds((1, 0, 1), cluster=NODES) == pytest.approx(3)
    assert seconds((1, 0, 2), (2, 1, 3), cluster=NODES) == pytest.approx(60)

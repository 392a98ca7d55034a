import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autodp.topology import Position, holder_ranks, pipeline_ranks, position, replica_ranks
from pipetransformer.autopipe.plan import Plan


def plan(num_devices: int, num_replicas: int, stages_per_rank: int = 1, replicas_adjacent: bool = False) -> Plan:
    stages = tuple((stage, stage) for stage in range(num_devices * stages_per_rank))
    return Plan(0, 0, stages, num_replicas, 1, "interleaved1f1b", stages_per_rank, replicas_adjacent=replicas_adjacent)


def test_a_pipeline_stays_together() -> None:
    assert [pipeline_ranks(plan(3, 2), replica) for replica in range(2)] == [(0, 1, 2), (3, 4, 5)]
    assert [replica_ranks(plan(3, 2), stage) for stage in range(3)] == [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 0)), (2, (0, 2)), (4, (1, 1)), (6, None), (7, None)])
def test_ranks_beyond_the_plan_are_idle(rank: int, expected: tuple[int, int] | None) -> None:
    assert position(plan(3, 2), rank) == (expected and Position(*expected))


def test_replicas_may_stay_together_instead() -> None:
    together = plan(3, 2, replicas_adjacent=True)
    assert [pipeline_ranks(together, replica) for replica in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [replica_ranks(together, device) for device in range(3)] == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("adjacent", "layers", "expected"),
    [(False, (0, 5), (3, 5)), (False, (1, 4), (4,)), (True, (0, 5), (1, 5)), (False, (0, 3), (3,))],
)
def test_the_holders_of_layers_are_the_devices_that_run_one_of_them(
    adjacent: bool, layers: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    two_chunks = plan(3, 2, stages_per_rank=2, replicas_adjacent=adjacent)
    assert holder_ranks(two_chunks, 1, layers) == expected


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_groups_and_positions_agree(num_devices: int, num_replicas: int, stages_per_rank: int, adjacent: bool) -> None:
    arrangement = plan(num_devices, num_replicas, stages_per_rank, adjacent)
    for rank in range(arrangement.num_devices):
        place = position(arrangement, rank)
        assert place is not None
        assert pipeline_ranks(arrangement, place.replica)[place.device] == rank
        assert replica_ranks(arrangement, place.device)[place.replica] == rank


@given(st.integers(1, 8), st.integers(1, 3))
def test_the_devices_of_a_pipeline_share_its_layers(num_devices: int, stages_per_rank: int) -> None:
    arrangement = plan(num_devices, 1, stages_per_rank)
    held = [layer for device in range(num_devices) for layer in arrangement.device_layers(device)]
    assert sorted(held) == list(range(num_devices * stages_per_rank))
    assert arrangement.device_layers(num_devices - 1)[-1] == arrangement.num_layers - 1, "the head is on the last"

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autodp.topology import Position, pipeline_ranks, position, replica_ranks
from pipetransformer.autopipe.plan import Plan


def plan(num_stages: int, num_replicas: int) -> Plan:
    return Plan(0, 0, tuple((stage, stage) for stage in range(num_stages)), num_replicas, num_microbatches=1)


def test_a_pipeline_stays_together() -> None:
    assert [pipeline_ranks(plan(3, 2), replica) for replica in range(2)] == [(0, 1, 2), (3, 4, 5)]
    assert [replica_ranks(plan(3, 2), stage) for stage in range(3)] == [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 0)), (2, (0, 2)), (4, (1, 1)), (6, None), (7, None)])
def test_ranks_beyond_the_plan_are_idle(rank: int, expected: tuple[int, int] | None) -> None:
    assert position(plan(3, 2), rank) == (expected and Position(*expected))


@given(st.integers(1, 8), st.integers(1, 8))
def test_groups_and_positions_agree(num_stages: int, num_replicas: int) -> None:
    arrangement = plan(num_stages, num_replicas)
    for rank in range(arrangement.num_devices):
        place = position(arrangement, rank)
        assert place is not None
        assert pipeline_ranks(arrangement, place.replica)[place.stage] == rank
        assert replica_ranks(arrangement, place.stage)[place.replica] == rank

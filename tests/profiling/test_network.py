"""Links are measured where there are any, and alike on every rank."""

import os
import sys

import pytest
from support.links import BYTES_PER_S, links, policies_of_measured_groups
from support.pool import Pool

from pipetransformer.profiling.network import FREE

LATENCY_S = 0.02


@pytest.mark.parametrize(("world_size", "devices_per_node"), [(1, 1), (2, 2), (2, 1), (4, 2), (3, 1)])
def test_a_link_is_measured_where_it_exists(pool: Pool, world_size: int, devices_per_node: int) -> None:
    measured = pool.run(world_size, links, devices_per_node, 0.0)
    assert measured == measured[:1] * world_size, "all ranks plan with the same numbers"
    for within, between in measured[0]:
        assert (within == FREE) == (devices_per_node == 1)
        assert (between is None) == (world_size == devices_per_node)
        assert all(number > 0 for link in (within, between or FREE) for number in link if link != FREE)


def test_the_links_between_nodes_are_told_from_those_within(pool: Pool) -> None:
    for within, between in pool.run(4, links, 2, LATENCY_S)[0]:
        assert within[0] == 0
        assert between == pytest.approx((LATENCY_S, BYTES_PER_S), rel=1e-5)
        assert within[1] > BYTES_PER_S


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has SCHED_BATCH")
def test_links_are_measured_by_groups_that_are_scheduled_as_those_of_a_run(pool: Pool) -> None:
    for policies in pool.run(2, policies_of_measured_groups):
        assert set(policies) == {os.SCHED_BATCH}

"""How many ranks lie together."""

import pytest
from support.links import node_size
from support.pool import Pool


@pytest.mark.parametrize(("local_world_sizes", "expected"), [([2, 2], 2), ([1, 1, 1], 1), ([4, 4, 4, 4], 4)])
def test_it_is_what_the_launcher_started_on_a_node(pool: Pool, local_world_sizes: list[int], expected: int) -> None:
    assert set(pool.run(len(local_world_sizes), node_size, local_world_sizes)) == {expected}


def test_nodes_that_differ_count_as_groups_that_fit_each(pool: Pool) -> None:
    assert set(pool.run(6, node_size, [4, 4, 4, 4, 2, 2])) == {2}, "ranks 4 and 5 are a node of their own"

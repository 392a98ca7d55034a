"""Samples stay with their node as far as equally many rows allow."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.plans import plan

from pipetransformer.autodp.sampler import home_nodes, reorder_for_locality, replica_batch
from pipetransformer.autodp.topology import Topology


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[int]]:
    num_nodes = draw(st.integers(1, 4))
    nodes = draw(st.lists(st.integers(0, num_nodes - 1), min_size=1, max_size=6))
    size = draw(st.integers(1, 40))
    ids = np.random.default_rng(draw(st.integers(0, 99))).permutation(100)[:size]
    return ids, home_nodes(100, num_nodes)[ids], nodes


@given(batches())
def test_the_batch_keeps_its_samples(batch: tuple[np.ndarray, np.ndarray, list[int]]) -> None:
    ids, homes, nodes = batch
    assert sorted(reorder_for_locality(ids, homes, nodes)) == sorted(ids)


@given(batches())
def test_as_many_samples_as_can_be_are_read_at_home(batch: tuple[np.ndarray, np.ndarray, list[int]]) -> None:
    ids, homes, nodes = batch
    routed = reorder_for_locality(ids, homes, nodes)
    home_of = dict(zip(ids.tolist(), homes.tolist(), strict=True))
    parts = [replica_batch(routed, replica, len(nodes), 1) for replica in range(len(nodes))]
    at_their_home = sum(
        home_of[sample] == node
        for node, part in zip(nodes, parts, strict=True)
        for sample in part.ids[part.weights == 1].tolist()
    )
    room = Counter[int]()
    for node, part in zip(nodes, parts, strict=True):
        room[node] += int(part.weights.sum())
    wanted = Counter(home_of.values())
    assert at_their_home == sum(min(room[node], wanted[node]) for node in room)


def test_the_drawing() -> None:
    ids = np.array([10, 11, 12, 13, 14, 15])
    assert reorder_for_locality(ids, np.array([0, 1, 0, 0, 1, 0]), [0, 1]).tolist() == [10, 12, 13, 11, 14, 15]


def test_homes_are_even() -> None:
    assert Counter(home_nodes(10, 4).tolist()) == {0: 3, 1: 3, 2: 2, 3: 2}


def test_a_replica_reads_where_its_first_stage_is() -> None:
    assert Topology(plan(0, 0, [3, 7], 2, 2), rank=0).reading_ranks == (0, 2)
    assert Topology(plan(0, 0, [7], 4, 1), rank=0).reading_ranks == (0, 1, 2, 3)

import pytest

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.constraints import UNCONSTRAINED, PlanConstraints
from pipetransformer.autopipe.plan import DeviceLayout, RankOrder
from pipetransformer.autopipe.search.candidates import candidates, device_layouts, smallest_candidates

ONE_NODE = Cluster(64, None, Link(0, 1e9))
NODES = Cluster(64, None, Link(0, 1e9), Link(0, 1e8), devices_per_node=8)


def replicas(
    cluster: Cluster,
    size: int,
    rank_order: RankOrder,
    constraints: PlanConstraints = UNCONSTRAINED,
    batch_size: int = 10,
) -> list[int]:
    every = device_layouts(cluster, 26, batch_size, constraints)
    return [each.num_replicas for each in every if (each.pipeline_size, each.rank_order) == (size, rank_order)]


def test_the_smallest_number_of_replicas_stands_for_all_with_the_same_share() -> None:
    assert replicas(ONE_NODE, 2, "pipeline-first") == [1, 2, 3, 4, 5, 10]  # shares of 10, 5, 4, 3, 2, 1
    assert replicas(ONE_NODE, 16, "pipeline-first") == [1, 2, 3, 4]
    assert replicas(ONE_NODE, 2, "pipeline-first", PlanConstraints(num_replicas=7)) == [7]


def test_ranks_are_replica_first_where_they_fill_nodes_evenly() -> None:
    assert replicas(NODES, 2, "replica-first", batch_size=32) == [2, 4, 8, 16, 32]
    assert replicas(NODES, 2, "replica-first", batch_size=20) == [2, 4, 8, 16]
    assert replicas(NODES, 1, "replica-first") == replicas(ONE_NODE, 2, "replica-first") == []


def test_thousands_of_devices_are_few_candidates() -> None:
    assert len(list(device_layouts(Cluster(4096, None, Link(0, 1e9)), 26, 4096, UNCONSTRAINED))) < 3000


def counts(
    size: int, stages_per_rank: int, batch_size: int = 24, constraints: PlanConstraints = UNCONSTRAINED
) -> list[tuple[int, str]]:
    every = candidates(DeviceLayout(size, 1), 26, batch_size, constraints, may_recompute=False)
    return [
        (candidate.num_microbatches, candidate.schedule)
        for candidate in every
        if candidate.stages_per_rank == stages_per_rank
    ]


def test_microbatches_are_powers_of_two_and_between_and_one_for_each_device_and_sample() -> None:
    assert [count for count, _ in counts(5, 1)] == [1, 2, 3, 4, 5, 6, 8, 12, 16, 24]


def test_1f1b_has_a_microbatch_for_each_device_and_interleaved_whole_rounds() -> None:
    assert counts(3, 1, 4) == [(1, "gpipe"), (2, "gpipe"), (3, "1f1b"), (4, "1f1b")]
    assert [count for count, _ in counts(5, 2)] == [1, 2, 3, 4, 5, 6, 8, 12, 24]  # not 16 in 3 rounds
    assert set(counts(3, 2)) >= {(3, "interleaved1f1b")}


@pytest.mark.parametrize(
    ("constraints", "num_stages"),
    [
        (UNCONSTRAINED, [3, 6, 9, 12]),
        (PlanConstraints(num_stages=6), [6]),
        (PlanConstraints(stages_per_rank=3), [9]),
        (PlanConstraints(schedule="gpipe"), [3]),
    ],
)
def test_devices_hold_up_to_four_stages(constraints: PlanConstraints, num_stages: list[int]) -> None:
    every = candidates(DeviceLayout(3, 1), 26, 8, constraints, may_recompute=False)
    assert sorted({candidate.num_stages for candidate in every}) == num_stages


@pytest.mark.parametrize(
    ("fixed", "may", "tried"),
    [(None, False, {False}), (None, True, {False, True}), (True, False, {True}), (False, True, {False})],
)
def test_recomputing_is_tried_where_memory_is_limited(fixed: bool | None, may: bool, tried: set[bool]) -> None:
    every = candidates(DeviceLayout(2, 1), 26, 8, PlanConstraints(recompute=fixed), may_recompute=may)
    assert {candidate.recompute for candidate in every} == tried


def lean(stages_per_rank: int) -> list[tuple[int, str, int, int]]:
    """Of pipelines of three devices on nine, with twelve samples: micro-batches, schedule, replicas, samples."""
    every = smallest_candidates(
        Cluster(9, None, Link(0, 1e9)),
        26,
        12,
        PlanConstraints(num_stages=3 * stages_per_rank, stages_per_rank=stages_per_rank),
    )
    return sorted(
        (candidate.num_microbatches, candidate.schedule, candidate.num_replicas, candidate.microbatch_size(12))
        for candidate in every
        if not candidate.recompute and candidate.num_replicas > 1
    )


def test_of_one_stage_on_a_device_those_with_fewer_samples_or_microbatches_are_lean() -> None:
    # of 2 replicas with 6 samples and 3 replicas with 4; 6 micro-batches of 1 sample need more than 4 of them
    assert lean(1) == [(1, "gpipe", 3, 4), (2, "gpipe", 3, 2), (3, "1f1b", 2, 2), (4, "1f1b", 3, 1)]


def test_with_several_stages_on_a_device_every_number_of_microbatches_may_be_lean() -> None:
    assert [count for count, *_ in lean(2)] == [1, 2, 3, 4, 6]

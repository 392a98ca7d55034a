from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.autopipe.plan import Stages
from pipetransformer.autopipe.search.partition import partition


def everything_fits(stage: int, first: int, last: int) -> bool:
    return True


def all_partitions(num_layers: int, num_stages: int) -> Iterator[Stages]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple((first, end - 1) for first, end in pairwise([0, *cuts, num_layers]))


def slowest(runs: Stages, seconds: list[int], boundary: list[list[int]]) -> int:
    return max(sum(seconds[first : last + 1]) + row[last] for row, (first, last) in zip(boundary, runs, strict=True))


@settings(deadline=None)
@given(
    layers=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(0, 5)), min_size=1, max_size=8),
    num_stages=st.integers(1, 9),
    budgets=st.lists(st.integers(0, 40), min_size=9, max_size=9),
    slower=st.lists(st.integers(1, 3), min_size=9, max_size=9),
)
def test_no_partition_that_fits_has_a_faster_slowest_stage(
    layers: list[tuple[int, int, int]], num_stages: int, budgets: list[int], slower: list[int]
) -> None:
    seconds, sizes, handed = ([layer[i] for layer in layers] for i in range(3))
    boundary = [[factor * size for size in handed] for factor in slower[:num_stages]]

    def fits(stage: int, first: int, last: int) -> bool:
        return sum(sizes[first : last + 1]) <= budgets[stage]

    possible = [
        slowest(runs, seconds, boundary)
        for runs in all_partitions(len(layers), num_stages)
        if all(fits(stage, *run) for stage, run in enumerate(runs))
    ]
    runs = partition(seconds, num_stages, fits, boundary)
    assert (runs is None) == (not possible)
    if runs is not None:
        assert runs in set(all_partitions(len(layers), num_stages))
        assert all(fits(stage, *run) for stage, run in enumerate(runs))
        assert slowest(runs, seconds, boundary) == min(possible)


@pytest.mark.parametrize(
    ("seconds", "stages"),
    [
        ([1, 1, 1, 1], ((0, 1), (2, 3))),
        ([5, 1, 1, 1], ((0, 0), (1, 3))),
        ([1, 1, 1, 5], ((0, 2), (3, 3))),
        ([0, 0, 0, 0], ((0, 0), (1, 3))),
        ([1, 0, 0, 0], ((0, 0), (1, 3))),
    ],
)
def test_two_stages(seconds: list[float], stages: Stages) -> None:
    assert partition(seconds, 2, everything_fits) == stages


def test_a_stage_pays_for_the_boundary_at_its_end() -> None:
    assert partition([3, 1, 1, 1], 2, everything_fits, boundary_seconds=[[9, 0, 0, 0]] * 2) == ((0, 1), (2, 3))


def test_nothing_beyond_the_limit_is_looked_for() -> None:
    assert partition([1, 1, 1, 5], 2, everything_fits, limit_s=5) == ((0, 2), (3, 3))
    assert partition([1, 1, 1, 5], 2, everything_fits, limit_s=4.9) is None
    assert partition([3, 1, 1, 1], 2, everything_fits, [[9, 9, 9, 0]] * 2, limit_s=11) is None


def test_a_layer_that_an_early_stage_cannot_hold_is_left_to_a_later_one() -> None:
    sizes, budgets = [1, 1, 5, 1], [2, 1, 6]

    def fits(stage: int, first: int, last: int) -> bool:
        return sum(sizes[first : last + 1]) <= budgets[stage]

    assert partition([1, 1, 1, 1], 3, fits) == ((0, 0), (1, 1), (2, 3))


def test_the_last_stage_is_held_even_where_a_part_of_it_would_need_room_to_hand_on() -> None:
    def fits(stage: int, first: int, last: int) -> bool:
        return last == 3 or first == last

    assert partition([1, 1, 1, 1], 2, fits) == ((0, 0), (1, 3))


def test_every_stage_takes_a_layer() -> None:
    assert partition([1, 1], 3, everything_fits) is None
    assert partition([1, 1], 2, everything_fits) == ((0, 0), (1, 1))


def test_a_stage_with_a_slow_link_ends_where_it_hands_over_little() -> None:
    assert partition([1, 1, 1, 1], 2, everything_fits, [[9, 2, 0, 0], [9, 9, 9, 0]]) == ((0, 2), (3, 3))


def test_a_limit_that_no_partition_keeps_takes_few_looks() -> None:
    num_looks = 0

    def fits(stage: int, first: int, last: int) -> bool:
        nonlocal num_looks
        num_looks += 1
        return True

    boundary = [[100.0] * 200] * 20
    assert partition([1.0] * 200, 20, fits, boundary, limit_s=109) is None
    assert num_looks <= 20, "one for each stage"
    assert partition([1.0] * 200, 20, fits, boundary, limit_s=110) is not None


@pytest.mark.parametrize("heaviest", [1, 100])
def test_a_thousand_layers_into_64_stages_look_at_few_runs(heaviest: int) -> None:
    seconds = [float(heaviest)] + [1 + (37 * layer % 101) / 100 for layer in range(1, 1000)]
    num_looks = 0

    def fits(stage: int, first: int, last: int) -> bool:
        nonlocal num_looks
        num_looks += 1
        return True

    assert partition(seconds, 64, fits) is not None
    assert num_looks < 100_000, "of 64 x 500,000 runs"

from collections.abc import Iterator
from itertools import combinations, pairwise
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autopipe.partition import Runs, partition


def everything_fits(stage: int, first: int, last: int) -> bool:
    return True


def all_partitions(num_layers: int, num_stages: int) -> Iterator[Runs]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple((first, end - 1) for first, end in pairwise([0, *cuts, num_layers]))


def slowest(runs: Runs, seconds: list[int], boundary: list[int]) -> int:
    return max(sum(seconds[first : last + 1]) + boundary[last] for first, last in runs)


@given(
    layers=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(0, 5)), min_size=1, max_size=8),
    num_stages=st.integers(1, 9),
    budgets=st.lists(st.integers(0, 40), min_size=9, max_size=9),
)
def test_no_partition_that_fits_has_a_faster_slowest_stage(
    layers: list[tuple[int, int, int]], num_stages: int, budgets: list[int]
) -> None:
    seconds, sizes, boundary = ([layer[i] for layer in layers] for i in range(3))

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
def test_two_stages(seconds: list[float], stages: Runs) -> None:
    assert partition(seconds, 2, everything_fits) == stages


def test_a_stage_pays_for_the_boundary_at_its_end() -> None:
    assert partition([3, 1, 1, 1], 2, everything_fits, boundary_seconds=[9, 0, 0, 0]) == ((0, 1), (2, 3))


def test_every_stage_takes_a_layer() -> None:
    assert partition([1, 1], 3, everything_fits) is None
    assert partition([1, 1], 2, everything_fits) == ((0, 0), (1, 1))


@pytest.mark.parametrize("heaviest", [1, 100])
def test_a_thousand_layers_into_64_stages_takes_less_than_a_second(heaviest: int) -> None:
    seconds = [float(heaviest)] + [1 + (37 * layer % 101) / 100 for layer in range(1, 1000)]
    start_s = perf_counter()
    assert partition(seconds, 64, everything_fits) is not None
    assert perf_counter() - start_s < 1

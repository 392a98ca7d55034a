from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autopipe.plan import Stages
from pipetransformer.autopipe.search.partition import interleave

SIZE = 2


def busiest(weights: list[int], runs: Stages) -> int:
    """On two devices in turn; what the stages so far take is a bound on what all take."""
    return max(sum(sum(weights[a : b + 1]) for a, b in runs[device::SIZE]) for device in range(SIZE))


@given(st.lists(st.integers(0, 9), min_size=4, max_size=8))
def test_no_other_cut_keeps_the_busiest_device_less_busy(weights: list[int]) -> None:
    found = interleave(weights, 4, lambda runs: busiest(weights, runs))
    cuts = combinations(range(1, len(weights)), 3)
    every = [tuple((a, b - 1) for a, b in pairwise([0, *cut, len(weights)])) for cut in cuts]
    assert found in every
    assert busiest(weights, found or ()) == min(busiest(weights, runs) for runs in every)


def test_a_heavy_stage_and_a_light_one_share_a_device() -> None:
    weights = [5, 3, 1, 3]
    assert interleave(weights, 4, lambda runs: busiest(weights, runs)) == ((0, 0), (1, 1), (2, 2), (3, 3))


@pytest.mark.parametrize("limit", [0.0, 3.0])
def test_nothing_is_found_below_a_limit_that_nothing_meets(limit: float) -> None:
    assert interleave([1, 1, 1, 1, 1, 1], 4, lambda runs: busiest([1] * 6, runs), limit) is None


def test_a_hopeless_case_ends_with_the_best_so_far() -> None:
    num_looks = 0

    def never_sure(runs: Stages) -> float:
        nonlocal num_looks
        num_looks += 1
        return float(len(runs) == 20)

    assert interleave([1] * 60, 20, never_sure, inf, max_evaluations=300)
    assert num_looks == 300

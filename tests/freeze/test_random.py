import random
from contextlib import AbstractContextManager
from math import fsum, nan
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policies import Row, check_mutation, check_table

from pipetransformer.freeze.base import Signals
from pipetransformer.freeze.random import RandomSchedule, freeze_times

MODULE = "pipetransformer.freeze.random"

# Seed 0 draws .844, .758, .421, .259, so that the blocks freeze at the same powers of .156, .242, .579, .741
SEED_0 = (0.15557814847495188, 0.24204556991965748, 0.579428418169155, 0.7410832497070366)
# Their mean is .4295: with that as what is left of the run, the power is 1
FIRST = RandomSchedule(fraction=1 - fsum(SEED_0) / 4)
FIRST_TABLE = [
    Row(progress=0.1, num_frozen=0, bound="draw", terms={"due": 0}),
    Row(progress=0.2, num_frozen=1, bound="draw", terms={"due": 1}),
    Row(progress=0.5, num_frozen=2, bound="draw", terms={"due": 2}),
    Row(progress=0.6, num_frozen=3, bound="draw", terms={"due": 3}),
    Row(progress=0.7, num_frozen=3, bound="draw"),
    Row(progress=0.8, num_frozen=4, bound="draw", terms={"due": 4}),
    Row(progress=0.9, num_frozen=4, bound="all frozen"),
]
# Their squares are .0242, .0586, .3357, .5492
SECOND = RandomSchedule(fraction=1 - fsum(time**2 for time in SEED_0) / 4)
SECOND_TABLE = [
    Row(progress=0.02, num_frozen=0, bound="draw"),
    Row(progress=0.05, num_frozen=1, bound="draw"),
    Row(progress=0.33, num_frozen=2, bound="draw"),
    Row(progress=0.34, num_frozen=3, bound="draw"),
    Row(progress=0.54, num_frozen=3, bound="draw"),
    Row(progress=0.55, num_frozen=4, bound="draw"),
]


def _in_order_of_the_draw(num_blocks: int, fraction: float, seed: int) -> tuple[float, ...]:
    draw = random.Random(seed)
    return tuple(draw.random() for _ in range(num_blocks))


MUTATIONS = {
    "the fraction is that of what trains": mock.patch(
        f"{MODULE}.freeze_times", lambda num_blocks, fraction, seed: freeze_times(num_blocks, 1 - fraction, seed)
    ),
    "the draws are taken as they are": mock.patch(f"{MODULE}.freeze_times", _in_order_of_the_draw),
    "another seed": mock.patch(
        f"{MODULE}.freeze_times", lambda num_blocks, fraction, seed: freeze_times(num_blocks, fraction, seed + 1)
    ),
}


def test_decisions_follow_the_tables() -> None:
    check_table(FIRST, 4, FIRST_TABLE)
    check_table(SECOND, 4, SECOND_TABLE)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_rule_leaves_the_tables(mutation: AbstractContextManager[object]) -> None:
    with mutation:
        check_mutation(FIRST, 4, FIRST_TABLE)
        check_mutation(SECOND, 4, SECOND_TABLE)


def test_a_block_freezes_at_its_very_time() -> None:
    times = freeze_times(4, 0.5, 3)
    frozen = [RandomSchedule(draw_seed=3).decide(Signals(0, 4, 0, progress=t), {})[0].num_frozen for t in times]
    assert frozen == [1, 2, 3, 4]


@given(num_blocks=st.integers(1, 96), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 10_000))
def test_the_mean_frozen_fraction_is_what_was_asked_for(num_blocks: int, fraction: float, seed: int) -> None:
    times = freeze_times(num_blocks, fraction, seed)
    assert list(times) == sorted(times)
    assert all(0 <= time <= 1 for time in times)  # a large power may round the first ones to 0
    assert fsum(1 - time for time in times) / num_blocks == pytest.approx(fraction, abs=1e-10)


def test_another_seed_gives_other_times() -> None:
    assert freeze_times(6, 0.5, 0) != freeze_times(6, 0.5, 1)


def test_a_frozen_block_stays_frozen_and_the_reason_has_the_numbers() -> None:
    decision, _ = FIRST.decide(Signals(0, 4, 3, progress=0.3), {})
    assert decision.num_frozen == 3
    assert decision.reason == "by the draw 2 of 4 blocks are due at 0.3 of the run; block 4 follows at 0.741"


@pytest.mark.parametrize("fraction", [0, 1, -0.5, nan])
def test_a_fraction_outside_its_range_is_an_error(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.fraction=.* is not a mean frozen fraction; .*freeze=none"):
        RandomSchedule(fraction=fraction)

from contextlib import AbstractContextManager
from math import ceil, nan
from unittest import mock

import pytest
from support.policies import Row, check_mutation, check_table

from pipetransformer.freeze.base import Signals
from pipetransformer.freeze.linear import LinearSchedule

MODULE = "pipetransformer.freeze.linear"
POLICY = LinearSchedule(start=0.2, level=0.8)

# 10 * 0.8 * (t - 0.2) / 0.8 = 10 (t - 0.2)
TABLE = [
    Row(progress=0.1, num_frozen=0, bound="start", terms={"linear": 0}),
    Row(progress=0.2, num_frozen=0, bound="linear", terms={"linear": 0}),
    Row(progress=0.3, num_frozen=1, bound="linear", terms={"linear": 1}),
    Row(progress=0.35, num_frozen=1, bound="linear", terms={"linear": 1.5}),
    Row(progress=0.6, num_frozen=4, bound="linear", terms={"linear": 4}),
    Row(progress=0.9, num_frozen=7, bound="linear", terms={"linear": 7}),
    Row(progress=1.0, num_frozen=8, bound="linear", terms={"linear": 8}),
]

MUTATIONS = {
    "rounded up": mock.patch(f"{MODULE}.floor", ceil),
    "rounding noise loses a block": mock.patch(f"{MODULE}.NOISE", 0.0),
    "the start does not count": mock.patch.object(
        LinearSchedule, "depth", lambda self, progress, num_blocks: num_blocks * self.level * progress
    ),
    "the slope is that of the whole run": mock.patch.object(
        LinearSchedule,
        "depth",
        lambda self, progress, num_blocks: num_blocks * self.level * max(0.0, progress - self.start),
    ),
    "the level does not count": mock.patch.object(
        LinearSchedule,
        "depth",
        lambda self, progress, num_blocks: num_blocks * max(0.0, progress - self.start) / (1 - self.start),
    ),
}


def test_decisions_follow_the_table() -> None:
    check_table(POLICY, 10, TABLE)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_rule_leaves_the_table(mutation: AbstractContextManager[object]) -> None:
    with mutation:
        check_mutation(POLICY, 10, TABLE)


def test_all_blocks_freeze_at_the_end_by_default() -> None:
    table = [Row(progress=0.75, num_frozen=3, bound="linear"), Row(progress=1.0, num_frozen=6, bound="linear")]
    check_table(LinearSchedule(), 6, [*table, Row(progress=1.0, num_frozen=6, bound="all frozen")])


def test_a_frozen_block_stays_frozen() -> None:
    assert POLICY.decide(Signals(0, 10, 5, progress=0.3), {})[0].num_frozen == 5


def test_the_reason_has_the_numbers() -> None:
    assert "10% of the run has passed, and nothing freezes before 20%" in reason(0.1)
    assert "after 35% of the run 1.5 of 10 blocks are due" in reason(0.35)


def reason(progress: float) -> str:
    return POLICY.decide(Signals(0, 10, 0, progress=progress), {})[0].reason


@pytest.mark.parametrize("start", [1, -0.1, nan])
def test_a_start_outside_the_run_is_an_error(start: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.start=.* is not a fraction of the run .*; give 0 or more"):
        LinearSchedule(start=start)


@pytest.mark.parametrize("level", [0, 1.1, nan])
def test_a_level_that_is_no_fraction_is_an_error(level: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.level=.* is not the fraction of the blocks .*freeze=none"):
        LinearSchedule(level=level)

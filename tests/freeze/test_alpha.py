from contextlib import AbstractContextManager
from fractions import Fraction
from math import ceil, floor, nan
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policies import Row, check_mutation, check_table

from pipetransformer.freeze.alpha import AlphaCap
from pipetransformer.freeze.base import Signals

MODULE = "pipetransformer.freeze.alpha"

# 12 (1 - (2/3)^T): 4, 6.67, 8.44, 9.63, 10.42, 10.95, 11.30
TABLE = [
    Row(num_frozen=4, bound="cap", terms={"cap": 4}),
    Row(num_frozen=7, bound="cap", terms={"cap": 20 / 3}),
    Row(num_frozen=9, bound="cap", terms={"cap": 76 / 9}),
    Row(num_frozen=10, bound="cap", terms={"cap": 260 / 27}),
    Row(num_frozen=11, bound="cap"),
    Row(num_frozen=11, bound="cap"),
    Row(num_frozen=12, bound="cap"),
    Row(num_frozen=12, bound="all frozen"),
]

MUTATIONS = {
    "the cap starts from whole blocks": mock.patch(
        f"{MODULE}.next_cap",
        lambda alpha, signals, state: signals.num_frozen + alpha * (signals.num_blocks - signals.num_frozen),
    ),
    "a fraction of all blocks": mock.patch(
        f"{MODULE}.next_cap", lambda alpha, signals, state: signals.num_frozen + alpha * signals.num_blocks
    ),
    "rounded down": mock.patch(f"{MODULE}.whole_blocks", floor),
}


def test_decisions_follow_the_table() -> None:
    check_table(AlphaCap(alpha=1 / 3), 12, TABLE)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_rule_leaves_the_table(mutation: AbstractContextManager[object]) -> None:
    with mutation:
        check_mutation(AlphaCap(alpha=1 / 3), 12, TABLE)


def test_where_a_target_has_frozen_more_the_cap_starts_from_what_is_frozen() -> None:
    decision, state = AlphaCap(alpha=0.1).decide(Signals(5, 12, 8, {}), {"cap": 1.2})
    assert (decision.num_frozen, state) == (9, {"cap": pytest.approx(8.4)})
    decision, _ = AlphaCap(alpha=0.1).decide(Signals(5, 12, 2, {}), {"cap": 1.2})
    assert decision.terms["cap"] == pytest.approx(2.28), "of the real number that was rounded up"


def test_rounding_noise_freezes_no_further_block() -> None:
    assert 0.07 * 100 > 7
    table = [Row(num_frozen=7, bound="cap")]
    check_table(AlphaCap(alpha=0.07), 100, table)
    with mock.patch(f"{MODULE}.whole_blocks", ceil):
        check_mutation(AlphaCap(alpha=0.07), 100, table)


@given(
    alpha=st.integers(2, 12).flatmap(lambda q: st.integers(1, q - 1).map(lambda p: Fraction(p, q))),
    num_blocks=st.integers(1, 96),
)
def test_the_closed_form_holds(alpha: Fraction, num_blocks: int) -> None:
    policy, num_frozen, state = AlphaCap(alpha=float(alpha)), 0, {}
    for count in range(1, 60):
        if num_frozen == num_blocks:
            break
        decision, state = policy.decide(Signals(count - 1, num_blocks, num_frozen), state)
        num_frozen = decision.num_frozen
        assert num_frozen == ceil(num_blocks * (1 - (1 - alpha) ** count))


def test_nothing_is_measured_and_the_reason_has_the_numbers() -> None:
    policy = AlphaCap(alpha=0.3)
    assert policy.signals == ()
    assert policy.decide(Signals(0, 6, 0), {})[0].reason == "30% of the active blocks freeze at once, 1.8 of 6 so far"


@pytest.mark.parametrize("alpha", [0, 1, -0.5, nan])
def test_alpha_outside_its_range_is_an_error(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.alpha=.* is not a fraction of the active blocks; give a number"):
        AlphaCap(alpha=alpha)

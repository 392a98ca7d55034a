from contextlib import AbstractContextManager
from math import inf, nan
from statistics import fmean
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policies import Row, check_mutation, check_table, not_in_a_row

from pipetransformer.freeze.autofreeze import AutoFreeze, percentile_of
from pipetransformer.freeze.base import Signals

MODULE = "pipetransformer.freeze.autofreeze"


def norms(*values: float) -> dict[str, tuple[float, ...]]:
    return {"gradient_norm": values}


TABLE = [
    Row(measured=norms(8, 4, 10, 5, 2, 1), num_frozen=0, bound="reference"),
    # 1/8, 1/4, 1/10, 2.5/5, .5/2, .6/1; the median of .1 .125 .25 .25 .5 .6 is .25, which block 2 has, too
    Row(measured=norms(7, 3, 9, 7.5, 2.5, 1.6), num_frozen=3, bound="percentile", terms={"percentile": 0.25}),
    # 7.5/7.5, 0, 0: the median is 0, which block 4 exceeds
    Row(measured=norms(0, 0, 0, 15, 2.5, 1.6), num_frozen=3, bound="change", terms={"percentile": 0}),
    # 3/15 = .2, .1/2.5 = .04, .4/1.6 = .25: the median is .2, which block 6 exceeds
    Row(
        measured=norms(0, 0, 0, 12, 2.6, 1.2),
        num_frozen=5,
        bound="percentile",
        terms={"percentile": 0.2, "change/block_04": 0.2, "change/block_05": 0.04, "change/block_06": 0.25},
    ),
    # the last block is its own median
    Row(measured=norms(0, 0, 0, 0, 0, 1.5), num_frozen=6, bound="percentile", terms={"percentile": 0.25}),
    Row(measured=norms(0, 0, 0, 0, 0, 0), num_frozen=6, bound="all frozen"),
]


def _over_the_new_norm(last: list[float | None] | None, values: tuple[float, ...]) -> list[float]:
    pairs = zip(last or [None] * len(values), values, strict=True)
    return [inf if old is None or not new else abs(old - new) / new for old, new in pairs]


def _absolute(last: list[float | None] | None, values: tuple[float, ...]) -> list[float]:
    pairs = zip(last or [None] * len(values), values, strict=True)
    return [inf if old is None else abs(old - new) for old, new in pairs]


def _below(values: list[float], percentile: float) -> float:
    return percentile_of(values, percentile) - 1e-6


MUTATIONS = {
    "the change is relative to the new norm": mock.patch(f"{MODULE}.relative_changes", _over_the_new_norm),
    "the change is absolute": mock.patch(f"{MODULE}.relative_changes", _absolute),
    "the mean in place of the percentile": mock.patch(f"{MODULE}.percentile_of", lambda values, _: fmean(values)),
    "the percentile itself does not freeze": mock.patch(f"{MODULE}.percentile_of", _below),
    "blocks that are not in a row freeze": not_in_a_row(MODULE),
}


def test_decisions_follow_the_table() -> None:
    check_table(AutoFreeze(), 6, TABLE)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_rule_leaves_the_table(mutation: AbstractContextManager[object]) -> None:
    with mutation:
        check_mutation(AutoFreeze(), 6, TABLE)


def test_another_percentile_decides_by_itself() -> None:
    # 20 % of the way through .1 .125 .25 .25 .5 .6 lies .125: block 1 alone
    row = Row(measured=TABLE[1].measured, num_frozen=1, bound="percentile", terms={"percentile": 0.125})
    check_table(AutoFreeze(percentile=20), 6, [TABLE[0], row])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 99.9))
def test_the_percentile_is_that_of_numpy(values: list[float], percentile: float) -> None:
    assert percentile_of(values, percentile) == pytest.approx(float(np.percentile(values, percentile)), rel=1e-9)


def test_a_block_that_was_frozen_in_the_last_interval_has_no_reference() -> None:
    state = {"norms": [None, 1.0, 1.0]}
    decision, state = AutoFreeze().decide(Signals(3, 3, 0, norms(2, 1, 1)), state)
    assert (decision.num_frozen, decision.bound) == (0, "reference")
    assert decision.reason == "there is no gradient norm of block 1 from the interval before"
    assert state == {"norms": [2, 1, 1]}


def test_a_norm_that_grows_from_zero_freezes_nothing_and_zero_has_not_changed() -> None:
    assert AutoFreeze().decide(Signals(1, 2, 0, norms(1, 1)), {"norms": [0.0, 1.0]})[0].num_frozen == 0
    assert AutoFreeze().decide(Signals(1, 2, 0, norms(0, 3)), {"norms": [0.0, 1.0]})[0].num_frozen == 1


def test_the_reason_has_the_numbers() -> None:
    last = {"norms": [8.0, 4.0, 2.0]}
    decision, _ = AutoFreeze().decide(Signals(1, 3, 0, norms(7, 3, 4)), last)
    assert decision.reason == (
        "the gradient norms of blocks 1 to 2 have changed by at most 0.25 of themselves, within 0.25, the percentile "
        "50 of the active blocks"
    )
    decision, _ = AutoFreeze().decide(Signals(1, 3, 0, norms(4, 3, 2)), last)
    assert decision.reason == (
        "the gradient norm of block 1 has changed by 0.5 of itself, more than 0.25, the percentile 50 of the active "
        "blocks"
    )


@pytest.mark.parametrize("norm", [nan, inf])
def test_a_norm_that_is_not_finite_is_an_error(norm: float) -> None:
    with pytest.raises(ValueError, match=r"gradient norm of block 2 is (nan|inf) at freeze decision 3.*optim\.lr="):
        AutoFreeze().decide(Signals(3, 3, 0, norms(1, norm, 2)), {"norms": [1.0, 1.0, 1.0]})


@pytest.mark.parametrize("percentile", [-1, 100, nan])
def test_a_percentile_that_no_block_exceeds_is_an_error(percentile: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.percentile=.* is not a percentile .*; give 0 or more"):
        AutoFreeze(percentile=percentile)

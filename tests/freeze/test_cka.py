from contextlib import AbstractContextManager
from math import inf, nan
from unittest import mock

import pytest
from support.policies import Row, at_most, check_mutation, check_table, no_reference_is_no_change, not_in_a_row

from pipetransformer.freeze import cka
from pipetransformer.freeze.base import Signals
from pipetransformer.freeze.cka import CkaRule

MODULE = "pipetransformer.freeze.cka"
_freeze_below = cka.freeze_below


def changes(*values: float) -> dict[str, tuple[float, ...]]:
    return {"feature_change": values}


TABLE = [
    Row(measured=changes(inf, inf, inf), num_frozen=0, bound="reference", terms={"tau": 0.01}),
    Row(measured=changes(0.009, 0.01, 0.001), num_frozen=1, bound="tau", terms={"change/block_02": 0.01}),
    Row(measured=changes(0, 0.02, 0.005), num_frozen=1, bound="change", terms={"change/block_02": 0.02}),
    Row(measured=changes(0, 0.009, 0.0099), num_frozen=3, bound="tau", terms={"change/block_03": 0.0099}),
    Row(measured=changes(0, 0, 0), num_frozen=3, bound="all frozen"),
]

MUTATIONS = {
    "the threshold itself freezes": at_most(MODULE),
    "no reference is no change": no_reference_is_no_change(MODULE),
    "blocks that are not in a row freeze": not_in_a_row("pipetransformer.freeze.common"),
    "the similarity is compared": mock.patch(
        f"{MODULE}.freeze_below",
        lambda signals, values, tau, name: _freeze_below(signals, [1 - value for value in values], tau, name),
    ),
}


def test_decisions_follow_the_table() -> None:
    check_table(CkaRule(), 3, TABLE)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_rule_leaves_the_table(mutation: AbstractContextManager[object]) -> None:
    with mutation:
        check_mutation(CkaRule(), 3, TABLE)


def test_features_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"feature change of block 2 is nan at freeze decision 4.*optim\.lr="):
        CkaRule().decide(Signals(4, 2, 1, changes(0, nan)), {})


def test_the_reason_has_the_numbers() -> None:
    decision, state = CkaRule().decide(Signals(1, 2, 0, changes(0.004, 1)), {})
    assert decision.reason == "the change of the features of block 1 is at most 0.004, below tau=0.01"
    assert state == {}


@pytest.mark.parametrize("tau", [0, 1.5, nan])
def test_a_threshold_that_is_no_change_is_an_error(tau: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.tau=.* is not a change of features, which is 1 - CKA; give"):
        CkaRule(tau=tau)

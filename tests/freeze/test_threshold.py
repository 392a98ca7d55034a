from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf, nan
from unittest import mock

import pytest
from support.policies import Row, at_most, check_mutation, check_table, no_reference_is_no_change, not_in_a_row

from pipetransformer.freeze.base import Decision, Signals, State
from pipetransformer.freeze.threshold import SIGNALS, ThresholdRule

MODULE = "pipetransformer.freeze.threshold"


def weights(*values: float) -> dict[str, tuple[float, ...]]:
    return {"weight_change": values}


def norms(*values: float) -> dict[str, tuple[float, ...]]:
    return {"gradient_norm": values}


WEIGHTS = ThresholdRule(signal="weight_change", tau=0.01, warmup=0.3)
WEIGHTS_TABLE = [
    Row(progress=0.1, measured=weights(inf, inf, inf, inf), num_frozen=0, bound="warmup"),
    Row(progress=0.2, measured=weights(0.001, 0.001, 0.001, 0.001), num_frozen=0, bound="warmup"),
    # block 2 is not below 0.01, so that block 3 waits
    Row(progress=0.3, measured=weights(0.009, 0.01, 0.001, 0.02), num_frozen=1, bound="tau", terms={"tau": 0.01}),
    Row(
        progress=0.4,
        measured=weights(0, 0.02, 0.001, 0.001),
        num_frozen=1,
        bound="change",
        terms={"change/block_02": 0.02, "change/block_03": 0.001, "change/block_04": 0.001},
    ),
    Row(progress=0.5, measured=weights(0, 0.005, 0.006, 0.03), num_frozen=3, bound="tau"),
    Row(progress=0.6, measured=weights(0, 0, 0, inf), num_frozen=3, bound="reference"),
    Row(progress=0.7, measured=weights(0, 0, 0, 0.001), num_frozen=4, bound="tau"),
    Row(progress=0.8, measured=weights(0, 0, 0, 0), num_frozen=4, bound="all frozen"),
]

NORMS = ThresholdRule(signal="gradient_norm", tau=0.1, warmup=0.2)
NORMS_TABLE = [
    Row(progress=0.1, measured=norms(10, 5, 2), num_frozen=0, bound="warmup"),
    # .5/10 = .05, .5/5 = .1, 0
    Row(progress=0.2, measured=norms(9.5, 4.5, 2), num_frozen=1, bound="tau", terms={"change/block_01": 0.05}),
    # .1/4.5 = .022, .21/2 = .105, which over 2.21 were .095
    Row(progress=0.3, measured=norms(0, 4.6, 2.21), num_frozen=2, bound="tau", terms={"change/block_03": 0.105}),
    # .09/2.21 = .041; since the first decision it is .15
    Row(progress=0.4, measured=norms(0, 0, 2.3), num_frozen=3, bound="tau", terms={"change/block_03": 9 / 221}),
]


class WithoutWarmup(ThresholdRule):
    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        return super().decide(replace(signals, progress=1.0), state)


class SinceTheFirstDecision(ThresholdRule):
    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        decision, new_state = super().decide(signals, state)
        return decision, state or new_state


def _over_the_new_norm(last: list[float] | None, values: tuple[float, ...]) -> list[float]:
    pairs = zip(last or [inf] * len(values), values, strict=True)
    return [abs(old - new) / new if new else inf for old, new in pairs]


MUTATIONS = {
    "the threshold itself freezes": at_most(MODULE),
    "no reference is no change": no_reference_is_no_change(MODULE),
    "blocks that are not in a row freeze": not_in_a_row("pipetransformer.freeze.common"),
}


def test_decisions_by_the_weights_follow_the_table() -> None:
    check_table(WEIGHTS, 4, WEIGHTS_TABLE)


def test_decisions_by_the_gradients_follow_the_table() -> None:
    check_table(NORMS, 3, NORMS_TABLE)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_rule_leaves_the_table(mutation: AbstractContextManager[object]) -> None:
    with mutation:
        check_mutation(WEIGHTS, 4, WEIGHTS_TABLE)


def test_a_broken_memory_leaves_the_table() -> None:
    check_mutation(SinceTheFirstDecision(signal="gradient_norm", tau=0.1, warmup=0.2), 3, NORMS_TABLE)
    with mock.patch(f"{MODULE}.relative_changes", _over_the_new_norm):
        check_mutation(NORMS, 3, NORMS_TABLE)


def test_a_warmup_that_does_not_count_leaves_the_table() -> None:
    check_mutation(WithoutWarmup(signal="weight_change", tau=0.01, warmup=0.3), 4, WEIGHTS_TABLE)


@pytest.mark.parametrize("signal", SIGNALS)
def test_only_the_signal_that_is_compared_is_measured(signal: str) -> None:
    policy = ThresholdRule(signal=signal, tau=0.1, warmup=0)
    assert policy.signals == (signal,)
    state = {"norms": [1.0, 1.0]} if signal == "gradient_norm" else {}
    values = (0.95, 2.0) if signal == "gradient_norm" else (0.05, 1.0)
    assert policy.decide(Signals(1, 2, 0, {signal: values}), state)[0].num_frozen == 1


def test_the_reason_has_the_numbers() -> None:
    policy = replace(WEIGHTS, warmup=0.0)
    assert reason(policy, 0.002, 0.004, 1) == (
        "the change of the weights between decisions of blocks 1 to 2 is at most 0.004, below tau=0.01"
    )
    assert reason(policy, 0.02, 1, 1) == (
        "the change of the weights between decisions of block 1 is 0.02, not below tau=0.01"
    )
    assert reason(policy, inf, 1, 1).startswith("there is nothing yet with which to compare the change of the weights")
    assert reason(WEIGHTS, 0, 0, 0) == "0% of the run has passed, and nothing freezes before 30%"


def reason(policy: ThresholdRule, *values: float) -> str:
    return policy.decide(Signals(1, 3, 0, weights(*values)), {})[0].reason


@pytest.mark.parametrize("signal", ["gradient_norm", "gradient_change", "relative_update"])
@pytest.mark.parametrize("value", [nan, inf])
def test_a_number_that_is_not_finite_is_an_error(signal: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{signal.replace('_', ' ')} of block 2 is (nan|inf).*optim\.lr="):
        ThresholdRule(signal=signal).decide(Signals(3, 2, 0, {signal: (1.0, value)}), {})


def test_weights_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"weight change of block 2 is nan at freeze decision 3.*optim\.lr="):
        WEIGHTS.decide(Signals(3, 3, 1, weights(nan, nan, 1)), {})


def test_an_unknown_signal_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"freeze\.signal=loss is unknown; choose one of gradient_norm, gradient_c"):
        ThresholdRule(signal="loss")


@pytest.mark.parametrize("tau", [0, -1, inf, nan])
def test_a_threshold_that_is_no_change_is_an_error(tau: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.tau=.* is not a relative change; give a number above 0"):
        ThresholdRule(tau=tau)


@pytest.mark.parametrize("warmup", [1, -0.1, nan])
def test_a_warmup_outside_the_run_is_an_error(warmup: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.warmup=.* is not a fraction of the run .*; give 0 or more"):
        ThresholdRule(warmup=warmup)

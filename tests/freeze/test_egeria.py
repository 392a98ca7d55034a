from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf, nan
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policies import Row, check_mutation, check_table, not_in_a_row

from pipetransformer.freeze.base import Decision, Signals, State
from pipetransformer.freeze.egeria import Egeria, relative_slope, smooth
from pipetransformer.optim.base import AdamW

MODULE = "pipetransformer.freeze.egeria"
POLICY = Egeria(window=3, tolerance=0.1, patience=2, rate_drop=0.1)


def plasticity(*values: float) -> dict[str, tuple[float, ...]]:
    return {"plasticity": values}


# Smoothed with a weight of 1/2; the line through three values rises by half the difference of the outer two.
TABLE = [
    Row(rate=1.0, measured=plasticity(inf, inf, inf), num_frozen=0, bound="window", terms={"calm": 0}),
    Row(rate=1.0, measured=plasticity(8, 4, 1), num_frozen=0, bound="window", terms={"plasticity": 8, "peak": 8}),
    # smoothed 6.5, 4, 1.5
    Row(rate=1.0, measured=plasticity(5, 4, 2), num_frozen=0, bound="window", terms={"plasticity": 6.5, "peak": 8}),
    # 5.5, 4, 2.5; slopes 1.25/8 = .156, 0: block 2 is calm, .75/2.5 = .3
    Row(rate=0.9, measured=plasticity(4.5, 4, 3.5), num_frozen=0, bound="patience", terms={"slope": 1.25 / 8}),
    # 5.3, 4, 3.5; .6/8 = .075: calm (.113 of the last value), 0: calm twice, 1/3.5 = .29
    Row(rate=0.9, measured=plasticity(5.1, 4, 4.5), num_frozen=0, bound="patience", terms={"slope": 0.075, "calm": 1}),
    # 5.3, 4, 4; .1/8 = .0125: calm twice, so that block 2 goes with it; .75/4 = .19
    Row(rate=0.8, measured=plasticity(5.3, 4, 4.5), num_frozen=2, bound="slope", terms={"slope": 0.0125, "calm": 2}),
    # 4; .25/4 = .0625: calm
    Row(rate=0.5, measured=plasticity(0, 0, 4), num_frozen=2, bound="patience", terms={"slope": 0.0625, "calm": 1}),
    # 5; .5/5 = .1: not below the tolerance
    Row(rate=0.4, measured=plasticity(0, 0, 6), num_frozen=2, bound="patience", terms={"slope": 0.1, "calm": 0}),
    # 5; .5/5
    Row(rate=0.3, measured=plasticity(0, 0, 5), num_frozen=2, bound="patience", terms={"slope": 0.1, "calm": 0}),
    Row(rate=0.1, measured=plasticity(0, 0, 5), num_frozen=2, bound="patience", terms={"slope": 0, "calm": 1}),
    Row(rate=0.09, measured=plasticity(0, 0, 5), num_frozen=3, bound="slope", terms={"calm": 2}),
    # .05 is below .08, a tenth of the rate at the first freeze
    Row(rate=0.05, measured=plasticity(0, 0, 0), num_frozen=0, bound="rate", terms={"rate": 0.05,
                                                                                    "rate_at_freeze": 0.8}),
    Row(rate=0.05, measured=plasticity(2, 2, 2), num_frozen=0, bound="window", terms={"plasticity": 2, "peak": 2}),
    Row(rate=0.05, measured=plasticity(2, 2, 2), num_frozen=0, bound="window"),
    Row(rate=0.05, measured=plasticity(2, 2, 2), num_frozen=0, bound="patience", terms={"slope": 0, "calm": 1}),
    Row(rate=0.05, measured=plasticity(2, 2, 2), num_frozen=3, bound="slope"),
    # once per drop: the next one is below .005
    Row(rate=0.01, measured=plasticity(0, 0, 0), num_frozen=3, bound="all frozen"),
    Row(rate=0.004, measured=plasticity(0, 0, 0), num_frozen=0, bound="rate", terms={"rate_at_freeze": 0.05}),
]  # fmt: skip


class CountsAllCalmDecisions(Egeria):
    def _follow(self, signals: Signals, block: int, state: State) -> dict[str, Any]:
        history = super()._follow(signals, block, state)
        before = state["histories"][block]["calm"] if "histories" in state else 0
        return history | {"calm": max(history["calm"], before + (history["calm"] > 0))}


class MeasuresFromTheLastFreeze(Egeria):
    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        decision, state = super().decide(signals, state)
        return decision, state | {"rate": signals.rate} if decision.bound == "slope" else state


class ThawsByTheFirstRate(Egeria):
    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        decision, state = super().decide(signals, state)
        return decision, state | {"rate": 0.8} if decision.bound == "slope" else state


class KeepsItsWindows(Egeria):
    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        decision, new_state = super().decide(signals, state)
        return decision, new_state or {"rate": None, "histories": [
            {"smoothed": [2.0, 2.0, 2.0], "peak": 2.0, "calm": 1}] * signals.num_blocks}  # fmt: skip


class InfinityIsNoValue(Egeria):
    def _follow(self, signals: Signals, block: int, state: State) -> dict[str, Any]:
        finite = tuple(0.0 if value == inf else value for value in signals["plasticity"])
        return super()._follow(replace(signals, measured=plasticity(*finite)), block, state)


def _signed_slope(values: list[float], peak: float) -> float:
    return (values[-1] - values[0]) / (len(values) - 1) / peak if peak else 0.0


MUTATIONS = {
    "a falling plasticity is calm": mock.patch(f"{MODULE}.relative_slope", _signed_slope),
    "the slope is absolute": mock.patch(f"{MODULE}.relative_slope", lambda values, peak: relative_slope(values, 1.0)),
    "the slope is relative to the last value": mock.patch(
        f"{MODULE}.relative_slope", lambda values, peak: relative_slope(values, values[-1])
    ),
    "nothing is smoothed": mock.patch(
        f"{MODULE}.smooth", lambda smoothed, value, window: [*smoothed, value][-window:]
    ),
    "blocks that are not in a row freeze": not_in_a_row(MODULE),
}  # fmt: skip
BROKEN = (CountsAllCalmDecisions, MeasuresFromTheLastFreeze, ThawsByTheFirstRate, KeepsItsWindows, InfinityIsNoValue)


def test_decisions_follow_the_table() -> None:
    check_table(POLICY, 3, TABLE)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_rule_leaves_the_table(mutation: AbstractContextManager[object]) -> None:
    with mutation:
        check_mutation(POLICY, 3, TABLE)


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_broken_memory_leaves_the_table(rule: type[Egeria]) -> None:
    check_mutation(rule(window=3, tolerance=0.1, patience=2, rate_drop=0.1), 3, TABLE)


@pytest.mark.parametrize("peak", [3e-5, 1e-3, 0.1])
def test_the_first_step_down_of_a_schedule_unfreezes(peak: float) -> None:
    """A tenth of the rate is the default of both; as numbers of a computer they differ by rounding at most."""
    optim = AdamW(lr=peak, schedule="step", milestones=[0.5])
    state: State = {"rate": optim.rate(0, 10), "histories": []}
    for step, bound in ((4, None), (5, "rate")):
        signals = Signals(1, 3, 1, {"plasticity": (inf,) * 3}, step / 10, optim.rate(step, 10))
        if bound is None:
            assert not POLICY._has_dropped(signals.rate, state["rate"])
        else:
            assert POLICY.decide(signals, state)[0].bound == bound


def test_a_rule_without_a_drop_unfreezes_nothing() -> None:
    policy = replace(POLICY, rate_drop=None)
    assert POLICY.may_unfreeze
    assert not policy.may_unfreeze
    table = [*TABLE[:11], Row(rate=1e-9, measured=plasticity(0, 0, 0), num_frozen=3, bound="all frozen")]
    check_table(policy, 3, table)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=8))
def test_the_slope_is_that_of_least_squares(values: list[float]) -> None:
    slope = float(np.polyfit(np.arange(len(values)), values, 1)[0])
    assert relative_slope(values, 2.0) == pytest.approx(abs(slope) / 2, abs=1e-9)


def test_smoothing_keeps_the_last_values_of_the_window() -> None:
    # weight 2 / (2 + 1): 3 -> 6 gives 5
    assert smooth([1.0, 3.0], 6.0, 2) == pytest.approx([3, 5])
    assert smooth([], 6.0, 2) == [6]


def test_a_block_that_never_moved_is_calm() -> None:
    table = [
        Row(measured=plasticity(0, 1), num_frozen=0, bound="window"),
        Row(measured=plasticity(0, 2), num_frozen=1, bound="slope"),
    ]
    check_table(Egeria(window=2, tolerance=0.1, patience=1), 2, table)


def test_a_block_that_the_guard_unfroze_begins_anew() -> None:
    policy, state = Egeria(window=2, patience=1), {}
    for count in range(2):
        decision, state = policy.decide(Signals(count, 2, 0, plasticity(1, 1)), state)
    assert decision.num_frozen == 2
    _, state = policy.decide(Signals(2, 2, 2, plasticity(0, 0)), state)
    decision, state = policy.decide(Signals(3, 2, 0, plasticity(1, 1)), state)
    assert (decision.num_frozen, decision.bound, state["rate"]) == (0, "window", None)


def test_the_reason_has_the_numbers() -> None:
    def reason(history: dict[str, Any], value: float, rate: float = 1.0, num_frozen: int = 0) -> str:
        state = {"rate": 0.5 if num_frozen else None, "histories": [history] * 2}
        return POLICY.decide(Signals(5, 2, num_frozen, plasticity(value, value), rate=rate), state)[0].reason

    calm = {"smoothed": [4.0, 4.0, 4.0], "peak": 4.0, "calm": 1}
    assert reason(calm, 4) == (
        "the plasticity of blocks 1 to 2 has a slope below 0.1 of its peak for 2 decisions or more"
    )
    assert reason(calm, 8) == ("the plasticity of block 1 has a slope of 0.167 of its peak; 0 of 2 decisions below 0.1")
    assert reason(calm | {"smoothed": []}, 4) == ("block 1 has 1 of 3 plasticities through which a line is laid")
    assert reason(calm, 0, rate=0.04, num_frozen=2) == (
        "the learning rate is 0.04, at most 0.1 of 0.5, with which the first block froze: all blocks train again"
    )  # fmt: skip


def test_a_plasticity_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"plasticity of block 2 is nan at freeze decision 4.*optim\.lr="):
        POLICY.decide(Signals(4, 2, 0, plasticity(1, nan)), {})


@pytest.mark.parametrize(
    ("knob", "value", "words"),
    [
        ("window", 1, "is too short for a slope; give 2 decisions or more"),
        ("tolerance", 0, "is no slope; give a number above 0"),
        ("tolerance", inf, "is no slope; give a number above 0"),
        ("tolerance", nan, "is no slope; give a number above 0"),
        ("patience", 0, "is no number of decisions; give 1 or more"),
        ("rate_drop", 0, "is no part of a learning rate; give a number between 0 and 1, or null"),
        ("rate_drop", 1, "is no part of a learning rate; give a number between 0 and 1, or null"),
        ("rate_drop", nan, "is no part of a learning rate; give a number between 0 and 1, or null"),
    ],
)
def test_a_knob_outside_its_range_is_an_error(knob: str, value: float, words: str) -> None:
    with pytest.raises(ValueError, match=rf"freeze\.{knob}={value} {words}"):
        Egeria(**{knob: value})

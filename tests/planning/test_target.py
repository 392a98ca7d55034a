"""A target ends a run at its mean frozen fraction, or its time, whatever the policy asks for."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision
from pipetransformer.freeze.none import NoFreezing
from pipetransformer.freeze.pipetransformer import PaperRule
from pipetransformer.freeze.schedule import FixedSchedule
from pipetransformer.planning import target as module
from pipetransformer.planning.target import Progress, Target, TargetState

Ask = Callable[[int, int], int]
"""The prefix that a policy asks for, by its decisions so far and the frozen blocks."""


def follow(target: Target, ask: Ask, num_steps: int, decision_every: int) -> tuple[float, list[int]]:
    """Returns what a run spends, and its prefix in each step."""
    state, num_frozen, prefixes = TargetState(), 0, list[int]()
    for step in range(num_steps):
        done = Progress(step / num_steps, 1 / num_steps)
        if step and step % decision_every == 0:
            state.proposal = ask(step // decision_every, num_frozen)
        decision = target.decision(state, done, num_frozen)
        if decision is not None:
            num_frozen = decision.num_frozen
            state.take(num_frozen)
        prefixes.append(num_frozen)
        target.spend(state, num_frozen, target.costs[num_frozen], done)
    return state.spent, prefixes


@st.composite
def targets(draw: st.DrawFn) -> Target:
    num_blocks = draw(st.integers(1, 24))
    if draw(st.booleans()):
        costs = tuple(1 - n / num_blocks for n in range(num_blocks + 1))
    else:
        seconds = st.lists(st.floats(0.01, 10), min_size=num_blocks + 1, max_size=num_blocks + 1)
        costs = tuple(sorted(draw(seconds), reverse=True))
    total = costs[-1] + draw(st.floats(0.01, 1)) * (costs[0] - costs[-1])
    return Target("freeze.target_fraction=x", costs, total)


ASKS: dict[str, Ask] = {
    "nothing": lambda _, num_frozen: num_frozen,
    "all at once": lambda *_: 24,
    "block by block": lambda count, num_frozen: max(num_frozen, count),
    "all at the end": lambda count, num_frozen: 24 if count > 7 else num_frozen,
}


@pytest.mark.parametrize("policy", ASKS)
@given(target=targets(), num_steps=st.integers(3, 300))
def test_a_run_ends_at_its_target_but_for_a_step_of_a_block(policy: str, target: Target, num_steps: int) -> None:
    check_end(policy, target, num_steps)


def check_end(policy: str, target: Target, num_steps: int) -> None:
    last = len(target.costs) - 1
    every = max(1, num_steps // 10)
    spent, prefixes = follow(target, lambda *now: min(last, ASKS[policy](*now)), num_steps, every)
    assert prefixes == sorted(prefixes), "nothing is unfrozen that the policy did not ask to"
    step_of_a_block = max(a - b for a, b in zip(target.costs, target.costs[1:], strict=False)) / num_steps
    assert spent == pytest.approx(target.total, rel=0, abs=step_of_a_block * (1 + 1e-6) + 1e-9 * target.costs[0])


def check_ends(target: Target) -> None:
    for policy in ASKS:
        check_end(policy, target, 100)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "what is spent does not count": lambda: mock.patch.object(Target, "need", lambda self, *_: self.total),
    "nothing is led": lambda: mock.patch.object(Target, "bounds", lambda self, *_: (0, len(self.costs) - 1)),
    "bounds are loose": lambda: mock.patch.object(module, "TOLERANCE", 0.05),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_other_bounds_miss_the_target(mutation: str) -> None:
    target = Target("freeze.target_fraction=0.5", tuple(1 - n / 6 for n in range(7)), 0.5)
    check_ends(target)
    with MUTATIONS[mutation](), pytest.raises(AssertionError):
        check_ends(target)


def test_a_policy_that_asks_for_more_is_held_and_goes_on_as_soon_as_it_may() -> None:
    target = Target("freeze.target_fraction=0.5", tuple(1 - n / 4 for n in range(5)), 0.5)
    _, prefixes = follow(target, lambda *_: 4, 8, 2)
    # 8 steps may spend 4 steps of all blocks. From step 2 on six may spend 2, a third each: 2 of 4 blocks (1/2 each)
    # may freeze and 3 (1/4 each) may not. After 2 at 1/2, four may spend 1, which is 1/4 each: 3 blocks.
    assert prefixes == [0, 0, 2, 2, 3, 3, 3, 3]


def test_a_decision_says_what_the_target_made_of_it() -> None:
    target = Target("freeze.target_fraction=0.5", tuple(1 - n / 4 for n in range(5)), 0.5)
    asked = Decision(4, "cap", "all may freeze", {"cap": 4.0})
    scaled = target.scaled(asked, TargetState(spent=0.25, proposal=4), Progress(0.25, 0.25), 0)
    assert (scaled.num_frozen, scaled.bound) == (2, "target")
    assert scaled.terms == {"cap": 4.0, "proposed": 4.0, "allowed": 2.0}
    assert scaled.reason == (
        "freeze.target_fraction=0.5 allows at most 2 blocks, as 0.25 of the 0.5 in which blocks may train are spent "
        "after 25% of the run; all may freeze"
    )


def test_a_target_that_is_missed_already_says_that_nothing_unfreezes_for_it() -> None:
    target = Target("freeze.target_fraction=0.5", tuple(1 - n / 4 for n in range(5)), 0.5)
    scaled = target.scaled(Decision(4, "cap", "all"), TargetState(spent=0.25, proposal=4), Progress(0.25, 0.25), 3)
    assert scaled.num_frozen == 3
    assert scaled.reason.startswith(
        "freeze.target_fraction=0.5 allows at most 2 blocks, and the 3 that are frozen stay so, as 0.25 of "
    )


def test_a_target_that_leads_goes_on_to_say_what_the_policy_itself_has_asked_for() -> None:
    target = Target("freeze.target_fraction=0.9", (1.0, 0.75, 0.5, 0.25, 0.0), 0.1)
    state, reasons = TargetState(), list[str]()
    state.ask(1)
    for step in range(4):
        decision = target.decision(state, Progress(0.2 * step, 0.2), 1 + step)
        if decision is not None:
            state.take(decision.num_frozen)
            reasons.append(decision.reason)
    assert len(reasons) > 1
    assert all(reason.endswith("; the policy last asked for 1") for reason in reasons), reasons


def test_a_decision_within_the_target_stays_what_it_is() -> None:
    target = Target("freeze.target_fraction=0.5", tuple(1 - n / 4 for n in range(5)), 0.5)
    scaled = target.scaled(Decision(1, "cap", "one"), TargetState(spent=0.25, proposal=1), Progress(0.25, 0.25), 0)
    assert (scaled.num_frozen, scaled.bound, scaled.reason) == (1, "cap", "one")


def test_a_policy_may_unfreeze_under_a_target() -> None:
    target = Target("freeze.target_fraction=0.5", tuple(1 - n / 4 for n in range(5)), 0.5)
    assert target.held(TargetState(spent=0.25, proposal=1), Progress(0.5, 0.25), num_frozen=3) == 1


def seconds() -> list[float]:
    return [2.0, 1.0, 1.5, 0.5]  # an arrangement for two frozen blocks is slower than that for one


def test_a_target_in_seconds_takes_predicted_steps_and_transitions() -> None:
    target = Target.of(PaperRule(target_seconds=60.0), 3, seconds, 50)
    assert target is not None
    assert target.costs == (100.0, 50.0, 50.0, 25.0)
    state = TargetState()
    target.spend(state, num_frozen=0, run_seconds=100.0, done=Progress(0.5, 0.1))
    target.spend_transition(state, 3.0)
    assert state.spent == 13.0


def test_a_target_in_seconds_follows_what_steps_have_shown_and_a_fraction_does_not() -> None:
    in_seconds, fraction = (
        Target.of(PaperRule(**options), 3, seconds, 50)
        for options in ({"target_seconds": 60.0}, {"target_fraction": 0.5})
    )
    assert in_seconds is not None
    assert fraction is not None
    slower = in_seconds.at_speed(lambda: [1.2 * each for each in seconds()], 50)
    assert slower.costs == pytest.approx((120.0, 60.0, 60.0, 30.0))
    assert slower.total == 60.0
    assert fraction.at_speed(lambda: [1.2 * each for each in seconds()], 50) == fraction


@pytest.mark.parametrize("stopped_at", [2, 4])
def test_a_run_that_goes_on_with_more_epochs_meets_its_target_in_all_of_them(stopped_at: int) -> None:
    """Of one epoch of ten steps that becomes three; a step of four blocks is a thirtieth of the run."""
    target, state, num_frozen = Target("freeze.target_fraction=0.5", (1.0, 0.75, 0.5, 0.25, 0.0), 0.5), TargetState(), 0
    for step in range(30):
        if step == stopped_at:
            state = TargetState.from_dict(state.state_dict())
        epochs = 1 if step < stopped_at else 3
        done = Progress(step / (10 * epochs), 1 / (10 * epochs), epochs)
        decision = target.decision(state, done, num_frozen)
        if decision is not None:
            num_frozen = decision.num_frozen
            state.take(num_frozen)
        target.spend(state, num_frozen, 0.0, done)
    assert state.spent == pytest.approx(0.5, abs=0.25 / 30)
    decision = Decision(4, "policy", "four")
    reason = target.scaled(decision, TargetState(0.25, 4, epochs=1), Progress(1 / 6, 1 / 30, 3), 0).reason
    assert "0.0833 of the 0.5 in which blocks may train are spent after 17% of the run" in reason


def test_seconds_that_are_spent_stay_what_they_are_with_more_epochs() -> None:
    target = Target.of(PaperRule(target_seconds=60.0), 3, seconds, 50)
    assert target is not None
    assert target.need(TargetState(spent=30.0, epochs=1), Progress(0.5, 0.02, 2)) == 60.0


def test_transitions_cost_no_fraction() -> None:
    target, state = Target.of(PaperRule(target_fraction=0.5), 3, seconds, 50), TargetState()
    assert target is not None
    target.spend_transition(state, 3.0)
    assert state.spent == 0


def test_without_a_target_there_is_none() -> None:
    assert Target.of(PaperRule(), 3, seconds, 50) is None
    assert Target.of(NoFreezing(target_fraction=0.5), 3, seconds, 50) is None


def test_targets_that_cannot_be_met_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        UserError, match=r"target_seconds=10 is not between the 25 s .* with all blocks frozen and the 100"
    ):
        Target.of(PaperRule(target_seconds=10.0), 3, seconds, 50)
    with pytest.raises(UserError, match=r"target_seconds=101 is not between"):
        Target.of(PaperRule(target_seconds=101.0), 3, seconds, 50)
    with pytest.raises(UserError, match=r"target_fraction=0\.2 is less than the 0\.667 .* \(2 of 3 blocks\)"):
        Target.of(FixedSchedule(num_frozen=[2], at_start=2, target_fraction=0.2), 3, seconds, 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_fraction": 1.0}, "target_fraction=1.0 is not a mean frozen fraction"),
        ({"target_seconds": 0.0}, "target_seconds=0.0 must be above 0"),
        ({"target_fraction": 0.5, "target_seconds": 9.0}, "are two targets"),
    ],
)
def test_options_that_are_no_target_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PaperRule(**options)


def test_a_run_that_goes_on_does_what_it_can_for_its_target() -> None:
    target = Target.of(PaperRule(target_seconds=10.0), 3, seconds, 50, is_new=False)
    assert target is not None
    assert target.bounds(TargetState(spent=5.0), Progress(0.5, 0.02)) == (3, 3)


@pytest.mark.parametrize(
    ("options", "state", "told"),
    [
        ({"target_seconds": 60.0}, TargetState(49.0), ""),  # 61.5 to 100 s in all, less than a step of 2 s over it
        ({"target_seconds": 60.0}, TargetState(40.0), ""),
        ({"target_seconds": 60.0}, TargetState(55.0), "target_seconds=60 will be missed: after 50% .* least 67.5 s"),
        ({"target_seconds": 90.0}, TargetState(30.0), "target_seconds=90 will be missed: after 50% .* most 80 s"),
        ({"target_fraction": 0.9}, TargetState(0.5, epochs=1), "target_fraction=0.9 will be missed: .* at most 0.5$"),
        ({"target_fraction": 0.1}, TargetState(0.0, epochs=1), "target_fraction=0.1 will be missed: .* at least 0.5$"),
        ({"target_fraction": 0.5}, TargetState(0.49, epochs=1), ""),
    ],
)
def test_a_run_that_goes_on_tells_what_it_will_come_to_at_best(
    options: dict[str, float], state: TargetState, told: str
) -> None:
    target = Target.of(PaperRule(**options), 3, seconds, 50, is_new=False)
    assert target is not None
    note = target.shortfall(state, Progress(0.5, 0.02))
    assert re.search(told, note) if told else not note, note


def test_a_target_that_begins_in_the_middle_takes_over_what_is_frozen_and_what_it_has_cost() -> None:
    target, state = Target.of(PaperRule(target_fraction=0.3), 4, list, 40, is_new=False), TargetState()
    done = Progress(0.5, 1 / 40, epochs=3)
    assert target is not None
    target.begin(state, 2, {0: 5, 2: 15}, done)  # which cost 5 times 1 and 15 times 1/2
    assert state == TargetState(spent=0.5 * 0.625, proposal=2, epochs=3, asked=2)
    assert target.decision(state, done, 2) is None, "what was frozen before it stays so"


def test_the_state_comes_back_from_its_plain_values() -> None:
    state = TargetState(0.25, 3, is_paused=True, epochs=5, asked=2)
    assert TargetState.from_dict(state.state_dict()) == state
    earlier = {name: value for name, value in state.state_dict().items() if name not in ("epochs", "asked")}
    assert TargetState.from_dict(earlier) == TargetState(0.25, 3, is_paused=True, asked=3), "of an earlier release"

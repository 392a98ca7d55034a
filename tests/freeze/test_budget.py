from contextlib import AbstractContextManager
from itertools import pairwise
from math import inf, nan
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import TINY, run_job
from support.policies import Row, check_mutation, check_table
from support.pool import Pool

from pipetransformer.freeze.base import Signals
from pipetransformer.freeze.budget import BudgetRule, given_up

MODULE = "pipetransformer.freeze.budget"
SHARES = (1, 0.9, 0.6, 0.4, 0.2)  # of a step with 0 to 4 blocks frozen


def drops(*values: float, shares: tuple[float, ...] = SHARES) -> dict[str, tuple[float, ...]]:
    return {"loss_drop": values, "step_share": shares}


RULE = BudgetRule(time_share=0.6)
TABLE = [
    # prefixes 2, 3, 4 fit and give up .2, .2, .7: the smaller of equals
    Row(measured=drops(0.1, 0.1, 0, 0.5), num_frozen=2, bound="budget", terms={"loss_drop_given_up": 0.2}),
    # .2, .2 - .3, -.1 + .4
    Row(
        measured=drops(0, 0, -0.3, 0.4),
        num_frozen=3,
        bound="budget",
        terms={"loss_drop_given_up": -0.1, "share": 0.4, "time_share": 0.6},
    ),
    Row(measured=drops(0, 0, 0, 0.1), num_frozen=3, bound="budget", terms={"loss_drop_given_up": -0.1}),
    Row(measured=drops(0, 0, 0, -0.3), num_frozen=4, bound="budget", terms={"loss_drop_given_up": -0.4}),
    Row(measured=drops(0, 0, 0, 0), num_frozen=4, bound="all frozen"),
]


def _without_ties(drops: list[float]) -> list[float]:
    lost = given_up(drops)
    return [each - 1e-9 * prefix for prefix, each in enumerate(lost)]


def _forgets(signals: Signals, state: dict[str, list[float]]) -> list[float]:
    return list(signals["loss_drop"])


MUTATIONS = {
    "the larger of equals": mock.patch(f"{MODULE}.given_up", _without_ties),
    "only the last block counts": mock.patch(f"{MODULE}.given_up", lambda drops: [0.0, *drops]),
    "the most is given up": mock.patch(
        f"{MODULE}.given_up", lambda drops: [-each for each in given_up(drops)]
    ),
    "what trains is given up": mock.patch(
        f"{MODULE}.given_up", lambda drops: [sum(drops[prefix:]) for prefix in range(len(drops) + 1)]
    ),
}  # fmt: skip


def test_decisions_follow_the_tables() -> None:
    check_table(RULE, 4, TABLE)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_rule_leaves_the_table(mutation: AbstractContextManager[object]) -> None:
    with mutation:
        check_mutation(RULE, 4, TABLE)


def test_frozen_blocks_that_are_forgotten_leave_the_table() -> None:
    with mock.patch(f"{MODULE}._last_drops", _forgets):
        check_mutation(RULE, 4, TABLE)


def test_a_share_that_must_be_undercut_leaves_the_table() -> None:
    check_mutation(BudgetRule(time_share=0.6 - 1e-9), 4, TABLE)


def test_all_blocks_freeze_where_no_prefix_fits_and_the_reason_says_so() -> None:
    decision, _ = BudgetRule(time_share=0.1).decide(Signals(0, 4, 0, drops(1, 1, 1, 1)), {})
    assert (decision.num_frozen, decision.bound) == (4, "nothing")
    assert decision.reason == ("no prefix meets time_share=0.1; with 4 of 4 blocks frozen the passes take 0.2 of all")


def test_a_share_that_no_prefix_meets_is_told_before_the_first_decision() -> None:
    assert [BudgetRule(time_share=share).shortfall(SHARES) for share in (0.2, 0.9)] == [None, None]
    assert BudgetRule(time_share=0.19).shortfall(SHARES) == (
        "no prefix meets freeze.time_share=0.19, so that all blocks freeze at the first decision: the passes of a step "
        "then take 0.2 of those with nothing frozen; give more than that"
    )


def test_a_run_whose_share_cannot_be_met_says_so(pool: Pool, tmp_path: Path) -> None:
    job = run_job(pool, 1, tmp_path / "run", *TINY, "freeze=budget", "freeze.time_share=0.01", "dry_run=true")
    assert [message.partition(",")[0] for message in job.messages] == ["no prefix meets freeze.time_share=0.01"]


def test_the_reason_has_the_numbers() -> None:
    decision, state = RULE.decide(Signals(0, 4, 0, drops(0.1, 0.1, 0, 0.5)), {})
    assert decision.reason == (
        "with 2 of 4 blocks frozen the passes take 0.6 of all, within time_share=0.6, and gives up 0.2 of the "
        "loss's fall per step, the least of 3 prefixes that fit"
    )
    assert state == {"loss_drop": [0.1, 0.1, 0, 0.5]}


@given(st.lists(st.lists(st.floats(-1, 1), min_size=5, max_size=5), min_size=1, max_size=6), st.floats(0.05, 0.95))
def test_a_prefix_fits_and_none_that_is_smaller_would_give_up_less(rows: list[list[float]], time_share: float) -> None:
    shares = tuple(1 - block / 5 for block in range(6))
    policy, num_frozen, state, prefixes = BudgetRule(time_share=time_share), 0, {}, [0]
    for count, row in enumerate(rows):
        values = tuple(0.0 if block < num_frozen else value for block, value in enumerate(row))
        decision, state = policy.decide(Signals(count, 5, num_frozen, drops(*values, shares=shares)), state)
        num_frozen = decision.num_frozen
        lost = given_up(state["loss_drop"])
        fitting = [prefix for prefix in range(6) if shares[prefix] <= time_share]
        assert num_frozen == min(fitting, key=lambda prefix: (lost[prefix], prefix)), "of those below it, too"
        prefixes.append(num_frozen)
    assert all(earlier <= later for earlier, later in pairwise(prefixes))


@pytest.mark.parametrize("value", [nan, inf])
def test_a_fall_of_the_loss_that_is_not_finite_is_an_error(value: float) -> None:
    with pytest.raises(ValueError, match=r"loss drop of block 2 is (nan|inf) at freeze decision 3.*optim\.lr="):
        BudgetRule().decide(Signals(3, 4, 0, drops(1, value, 1, 1)), {})


@pytest.mark.parametrize("time_share", [0, 1, -0.5, nan])
def test_a_share_outside_its_range_is_an_error(time_share: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.time_share=.* is not a share of a full step; .*freeze=none"):
        BudgetRule(time_share=time_share)

"""What the guard decides follows from numbers alone."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipetransformer.config.sections import Guard
from pipetransformer.freeze.common import NOISE
from pipetransformer.planning.guard import (
    MEAN_STEPS,
    NUM_WARMUP_NORMS,
    GuardState,
    Watched,
    judge_freeze,
    judge_step,
    norm_limit,
)

WATCHED = Watched(step=120, num_frozen=2, metric=0.9, policy_state={"cap": 2.5})


@given(st.lists(st.floats(0.0, 1e6), min_size=NUM_WARMUP_NORMS, max_size=3 * MEAN_STEPS))
def test_the_limit_is_a_multiple_of_a_mean_within_the_norms_seen(norms: list[float]) -> None:
    state, options = GuardState(), Guard(max_norm_ratio=4.0)
    for index, norm in enumerate(norms):
        assert (norm_limit(options, state) == math.inf) == (index < NUM_WARMUP_NORMS)
        state.add_norm(norm)
    limit = norm_limit(options, state)
    assert 4 * min(norms) - 1e-3 <= limit <= 4 * max(norms) + 1e-3
    if len(norms) <= MEAN_STEPS:
        assert limit == pytest.approx(4 * math.fsum(norms) / len(norms), rel=1e-9, abs=1e-9)
    assert norm_limit(Guard(), state) == math.inf


def test_a_good_step_ends_a_row_of_skipped_ones() -> None:
    state = GuardState(num_skips=3)
    assert judge_step(Guard(), state, "skip", "step 7: it is nan").action == "stop"
    state.add_norm(1.0)
    verdict = judge_step(Guard(), state, "skip", "step 9: it is nan")
    assert (verdict.action, verdict.reason) == ("skip", "step 9: it is nan; its update is skipped")


def test_weights_are_rolled_back_no_more_often_than_allowed() -> None:
    options = Guard(max_rollbacks=2)
    assert judge_step(options, GuardState(num_rollbacks=1), "roll_back", "bad").action == "roll_back"
    verdict = judge_step(options, GuardState(num_rollbacks=2), "roll_back", "bad")
    assert (verdict.action, verdict.reason) == (
        "stop", "bad, after 2 times that the weights were rolled back (guard.max_rollbacks=2)",
    )  # fmt: skip


@pytest.mark.parametrize("action", ["stop", "unfreeze", "roll_back"])
@given(metric=st.floats(0, 1) | st.just(math.nan), allowed=st.floats(0, 1))
def test_a_freeze_hurts_where_the_metric_falls_by_more_than_allowed(action: str, metric: float, allowed: float) -> None:
    options = Guard(freeze=action)
    verdict = judge_freeze(options, allowed, GuardState(watched=WATCHED), "accuracy", metric)
    assume(not 0 < 0.9 - allowed - metric < 2 * NOISE)  # rounding, of which the test below has a case
    assert (verdict is None) == (metric >= 0.9 - allowed)
    if verdict is not None:
        assert verdict.action == action
        assert verdict.reason.startswith("accuracy fell from 0.9 to ")
        assert verdict.terms["allowed_fall"] == allowed


def test_a_metric_that_falls_by_what_is_allowed_hurts_nobody() -> None:
    watched = GuardState(watched=replace(WATCHED, metric=0.8))
    assert judge_freeze(Guard(), 0.01, watched, "accuracy", 0.79) is None, "0.8 - 0.79 is more than 0.01"
    assert judge_freeze(Guard(), 0.01, watched, "accuracy", 0.7899) is not None


def test_nothing_is_judged_that_is_not_watched() -> None:
    assert judge_freeze(Guard(), 0.0, GuardState(), "accuracy", 0.0) is None


def test_after_the_last_roll_back_the_frozen_blocks_stay() -> None:
    state = GuardState(watched=WATCHED, num_rollbacks=3)
    verdict = judge_freeze(Guard(), 0.0, state, "accuracy", 0.5)
    assert verdict is not None
    assert verdict.action == "hold"
    stopped = judge_freeze(Guard(freeze="stop"), 0.0, state, "accuracy", 0.5)
    assert stopped is not None
    assert stopped.action == "stop"


@pytest.mark.parametrize("watched", [None, WATCHED])
def test_the_memory_survives_json(watched: Watched | None) -> None:
    state = GuardState(0.1 + 0.2, 17, 1, 4, 2, 33, True, watched)
    assert GuardState.from_dict(json.loads(json.dumps(state.state_dict()))) == state

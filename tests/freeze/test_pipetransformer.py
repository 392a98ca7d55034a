from fractions import Fraction
from math import ceil, inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.freeze.base import Signals, State
from pipetransformer.freeze.pipetransformer import PaperRule


def signals(norms: list[float], num_frozen: int = 0, decision: int = 0) -> Signals:
    return Signals(decision, len(norms), num_frozen, {"gradient_norm": tuple(norms)})


def test_the_block_with_the_smallest_norm_freezes_with_all_below_it() -> None:
    decision, state = PaperRule(alpha=0.9).decide(signals([5, 4, 3, 1, 2, 6]), {})
    assert (decision.num_frozen, decision.bound) == (4, "gradient")
    assert decision.terms == {"cap": pytest.approx(5.4), "argmin": 4}
    assert state == {}


def test_the_lowest_active_block_can_freeze_alone() -> None:
    decision, _ = PaperRule(alpha=0.9).decide(signals([0, 0, 1, 2, 3], num_frozen=2), {})
    assert decision.num_frozen == 3


def test_of_equal_norms_the_lowest_block_decides() -> None:
    decision, _ = PaperRule(alpha=0.9).decide(signals([2, 1, 1, 1]), {})
    assert decision.num_frozen == 2


def test_the_cap_binds_before_the_gradients() -> None:
    decision, state = PaperRule(alpha=0.3).decide(signals([3, 3, 3, 3, 3, 1]), {})
    assert (decision.num_frozen, decision.bound) == (2, "cap")
    assert state == {"cap": pytest.approx(1.8)}
    assert decision.reason == "at most 30% of the active blocks at once, a cap of 1.8; the gradients would allow 6"


def test_the_gradients_bind_before_the_cap() -> None:
    decision, _ = PaperRule(alpha=0.5).decide(signals([1, 2, 3, 4]), {})
    assert (decision.num_frozen, decision.bound) == (1, "gradient")
    assert decision.reason == "block 1 has the smallest gradient norm, 1; alpha=0.5 would allow 2"


def test_after_the_gradients_have_bound_the_cap_starts_from_the_frozen_blocks() -> None:
    policy = PaperRule(alpha=0.5)
    _, state = policy.decide(signals([1, 2, 3, 4, 5, 6, 7, 8]), {})
    decision, _ = policy.decide(signals([0, 2, 3, 4, 5, 6, 7, 1], num_frozen=1), state)
    assert decision.terms["cap"] == 1 + 0.5 * 7


@given(
    alpha=st.integers(2, 12).flatmap(lambda q: st.integers(1, q - 1).map(lambda p: Fraction(p, q))),
    num_blocks=st.integers(1, 96),
)
def test_the_cap_alone_follows_its_closed_form(alpha: Fraction, num_blocks: int) -> None:
    policy, num_frozen, state = PaperRule(alpha=float(alpha)), 0, State()
    norms = [1.0] * (num_blocks - 1) + [0.5]
    for count in range(1, 60):
        decision, state = policy.decide(signals(norms, num_frozen), state)
        num_frozen = decision.num_frozen
        assert num_frozen == ceil(num_blocks * (1 - (1 - alpha) ** count))
        if num_frozen == num_blocks:
            break


def test_rounding_noise_freezes_no_further_block() -> None:
    assert 0.07 * 100 > 7
    assert PaperRule(alpha=0.07).decide(signals([1.0] * 99 + [0.5]), {})[0].num_frozen == 7


def test_a_state_from_before_more_blocks_froze_unfreezes_none() -> None:
    decision, _ = PaperRule(alpha=0.1).decide(signals([0, 0, 0, 2, 1], num_frozen=3), {"cap": 0.5})
    assert (decision.num_frozen, decision.terms["cap"]) == (4, 3.2), "10% of the two that are left"


@given(norms=st.lists(st.floats(0, 1e6), min_size=1, max_size=24), alpha=st.floats(0.01, 0.99), data=st.data())
def test_a_decision_respects_both_terms_and_never_unfreezes(
    norms: list[float], alpha: float, data: st.DataObject
) -> None:
    num_frozen = data.draw(st.integers(0, len(norms)))
    decision, _ = PaperRule(alpha=alpha).decide(signals(norms, num_frozen), {})
    assert num_frozen <= decision.num_frozen <= len(norms)
    for bound in decision.terms.values():
        assert decision.num_frozen < bound + 1


def test_a_model_that_is_all_frozen_stays_so() -> None:
    decision, state = PaperRule().decide(signals([0, 0], num_frozen=2), {"cap": 1.5})
    assert (decision.num_frozen, decision.bound) == (2, "all frozen")
    assert state == {"cap": 1.5}


@pytest.mark.parametrize("norm", [nan, inf])
def test_a_norm_that_is_not_finite_is_an_error(norm: float) -> None:
    with pytest.raises(ValueError, match=r"block 2 is (nan|inf) at freeze decision 3.*optim\.lr="):
        PaperRule().decide(signals([1, norm, 2], decision=3), {})


@pytest.mark.parametrize("alpha", [0, 1, -0.5, nan])
def test_alpha_outside_its_range_is_an_error(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.alpha="):
        PaperRule(alpha=alpha)


def test_the_interval_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"freeze\.interval=2"):
        PaperRule(interval=2)

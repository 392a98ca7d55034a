from contextlib import AbstractContextManager
from math import cos, nan, pi
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policies import Row, check_mutation, check_table

from pipetransformer.freeze.base import Signals
from pipetransformer.freeze.freezeout import FreezeOut

MODULE = "pipetransformer.freeze.freezeout"

LINEAR = FreezeOut(t0=0.5, cubic=False, scale=False)  # of 5 blocks: .5, .625, .75, .875, 1
LINEAR_TABLE = [
    Row(progress=0.4, num_frozen=0, bound="rate", terms={"next_end": 0.5}),
    Row(progress=0.5, num_frozen=1, bound="annealed", terms={"next_end": 0.625}),
    Row(progress=0.6, num_frozen=1, bound="rate", terms={"next_end": 0.625}),
    Row(progress=0.75, num_frozen=3, bound="annealed", terms={"next_end": 0.875}),
    Row(progress=0.9, num_frozen=4, bound="annealed", terms={"next_end": 1}),
    Row(progress=0.99, num_frozen=4, bound="rate"),
    Row(progress=1.0, num_frozen=5, bound="annealed"),
    Row(progress=1.0, num_frozen=5, bound="all frozen"),
]
CUBIC = FreezeOut(t0=0.5, cubic=True)  # .125, .2441, .4219, .6699, 1
CUBIC_TABLE = [
    Row(progress=0.1, num_frozen=0, bound="rate", terms={"next_end": 0.125}),
    Row(progress=0.2, num_frozen=1, bound="annealed", terms={"next_end": 0.244140625}),
    Row(progress=0.3, num_frozen=2, bound="annealed", terms={"next_end": 0.421875}),
    Row(progress=0.4, num_frozen=2, bound="rate"),
    Row(progress=0.5, num_frozen=3, bound="annealed", terms={"next_end": 0.669921875}),
    Row(progress=0.7, num_frozen=4, bound="annealed"),
]

# cos(pi/2) = 0, cos(pi/3) = .5, cos(pi/4) = .7071, cos(3 pi/4) = -.7071; blocks 1, 3 and 5
FACTORS = {0.0: (1, 1, 1), 0.25: (0.5, 0.75, 0.8535533905932737), 0.75: (0, 0, 0.14644660940672624)}
SCALED = {0.0: (2, 4 / 3, 1), 0.25: (1, 1, 0.8535533905932737), 0.75: (0, 0, 0.14644660940672624)}


def check_factors(policy: FreezeOut, expected: dict[float, tuple[float, ...]]) -> None:
    for progress, factors in expected.items():
        assert policy.rate_factors(progress, 5)[::2] == pytest.approx(factors, abs=1e-12)


def _from_zero(self: FreezeOut, num_blocks: int) -> tuple[float, ...]:
    return tuple(self.t0 + (1 - self.t0) * (block + 1) / num_blocks for block in range(num_blocks))


def _squared(self: FreezeOut, num_blocks: int) -> tuple[float, ...]:
    return tuple((0.5 + 0.5 * block / 4) ** 2 for block in range(num_blocks))


MUTATIONS = {
    "the first block trains longer than t0": mock.patch.object(FreezeOut, "ends", _from_zero),
    "squares in place of cubes": mock.patch.object(FreezeOut, "ends", _squared),
    "the top freezes first": mock.patch.object(
        FreezeOut, "ends", lambda self, num_blocks: tuple(1 - 0.125 * block for block in range(num_blocks))
    ),
}
FACTOR_MUTATIONS = {
    "the rate anneals over the run": lambda self, progress, end: 0.5 * (1 + cos(pi * progress)),
    "the rate begins at two": lambda self, progress, end: 1 + cos(pi * progress / end) if progress < end else 0.0,
    "the rate falls in a line": lambda self, progress, end: max(0.0, 1 - progress / end),
    "the rate comes back": lambda self, progress, end: 0.5 * (1 + cos(pi * progress / end)),
    "all rates are scaled alike": lambda self, progress, end: (
        2 * 0.5 * (1 + cos(pi * progress / end)) if progress < end else 0.0
    ),
}


def test_decisions_follow_the_tables() -> None:
    check_table(LINEAR, 5, LINEAR_TABLE)
    check_table(CUBIC, 5, CUBIC_TABLE)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_rule_leaves_the_tables(mutation: AbstractContextManager[object]) -> None:
    with mutation:
        check_mutation(LINEAR, 5, LINEAR_TABLE)
        check_mutation(CUBIC, 5, CUBIC_TABLE)


def test_a_block_freezes_at_its_end_though_the_end_is_rounded_up() -> None:
    policy = FreezeOut(t0=0.3, cubic=False)
    assert policy.ends(6)[0] > 0.3
    check_table(policy, 6, [Row(progress=0.3, num_frozen=1, bound="annealed")])
    with mock.patch(f"{MODULE}.NOISE", 0.0):
        check_mutation(policy, 6, [Row(progress=0.3, num_frozen=1, bound="annealed")])


def test_rates_follow_the_tables() -> None:
    check_factors(LINEAR, FACTORS)
    check_factors(FreezeOut(t0=0.5, cubic=False), SCALED)


@pytest.mark.parametrize("factor", FACTOR_MUTATIONS.values(), ids=FACTOR_MUTATIONS)
def test_broken_rates_leave_the_tables(factor: object) -> None:
    with mock.patch.object(FreezeOut, "_factor", factor):
        with pytest.raises(AssertionError):
            check_factors(LINEAR, FACTORS)
        with pytest.raises(AssertionError):
            check_factors(FreezeOut(t0=0.5, cubic=False), SCALED)


@given(t0=st.floats(0.05, 0.95), cubic=st.booleans(), num_blocks=st.integers(1, 48), progress=st.floats(0, 1))
def test_a_block_has_no_rate_from_its_end_on_and_the_last_trains_to_the_end(
    t0: float, cubic: bool, num_blocks: int, progress: float
) -> None:
    policy = FreezeOut(t0=t0, cubic=cubic)
    ends, factors = policy.ends(num_blocks), policy.rate_factors(progress, num_blocks)
    assert list(ends) == sorted(ends)
    assert ends[-1] == 1
    assert all((factor == 0) == (progress >= end) or factor < 1e-12 for factor, end in zip(factors, ends, strict=True))
    frozen = policy.decide(Signals(0, num_blocks, 0, progress=progress), {})[0].num_frozen
    assert all(factor < 1e-12 for factor in factors[:frozen])


def test_scaled_blocks_move_equally_far_in_sum() -> None:
    num_steps, sums = 2000, [0.0] * 4
    for step in range(num_steps):
        rates = FreezeOut().rate_factors((step + 0.5) / num_steps, 4)
        sums = [total + rate / num_steps for total, rate in zip(sums, rates, strict=True)]
    assert sums == pytest.approx([0.5] * 4, abs=1e-5)


def test_blocks_have_rates_of_their_own_and_the_reason_has_the_numbers() -> None:
    assert LINEAR.has_own_rates
    assert reason(0.4) == "block 1 trains until 0.5 of the run; 0.4 has passed"
    assert reason(0.6) == "the rate of block 1 is zero from 0.5 of the run on; 0.6 has passed"


def reason(progress: float) -> str:
    return LINEAR.decide(Signals(0, 5, 0, progress=progress), {})[0].reason


@pytest.mark.parametrize("t0", [0, 1, -0.5, nan])
def test_a_first_end_outside_the_run_is_an_error(t0: float) -> None:
    with pytest.raises(ValueError, match=r"freeze\.t0=.* is not a fraction of the run .*; give a number between 0"):
        FreezeOut(t0=t0)

import pytest

from pipetransformer.freeze.base import Signals
from pipetransformer.freeze.schedule import FixedSchedule


def frozen(policy: FixedSchedule, decision: int, num_frozen: int = 0, num_blocks: int = 6) -> int:
    return policy.decide(Signals(decision, num_blocks, num_frozen, {"gradient_norm": (1.0,) * num_blocks}), {})[
        0
    ].num_frozen


def test_each_decision_takes_its_entry_and_the_last_one_stays() -> None:
    policy = FixedSchedule(num_frozen=[0, 2, 2, 6])
    assert [frozen(policy, decision) for decision in range(6)] == [0, 2, 2, 6, 6, 6]


def test_a_frozen_block_stays_frozen() -> None:
    assert frozen(FixedSchedule(num_frozen=[1, 3]), 0, num_frozen=2) == 2


def test_the_reason_names_the_entry() -> None:
    decision, _ = FixedSchedule(num_frozen=[1, 3]).decide(Signals(1, 6, 1, {"gradient_norm": (1.0,) * 6}), {})
    assert decision.bound == "schedule"
    assert "3 of 6 blocks at entry 2 of 2; 1 were frozen before" in decision.reason


@pytest.mark.parametrize("num_frozen", [[], [-1, 2], [3, 2]])
def test_a_list_that_is_no_schedule_is_an_error(num_frozen: list[int]) -> None:
    with pytest.raises(ValueError, match=r"freeze\.num_frozen=.*none smaller than the one before"):
        FixedSchedule(num_frozen=num_frozen)


def test_more_blocks_than_the_model_has_are_an_error_from_the_start() -> None:
    FixedSchedule(num_frozen=[2, 6], at_start=2).check(6)
    with pytest.raises(ValueError, match=r"freezes up to 7 blocks, but the model has 6"):
        FixedSchedule(num_frozen=[2, 7]).check(6)
    with pytest.raises(ValueError, match=r"freeze\.at_start=7 is more than the 6 blocks"):
        FixedSchedule(num_frozen=[7], at_start=7).check(6)


def test_blocks_may_be_frozen_from_the_start() -> None:
    assert FixedSchedule(num_frozen=[2]).frozen_at_start == 0
    assert FixedSchedule(num_frozen=[2, 4], at_start=2).frozen_at_start == 2


@pytest.mark.parametrize("at_start", [-1, 3])
def test_what_is_frozen_at_the_start_does_not_thaw_at_the_first_decision(at_start: int) -> None:
    with pytest.raises(ValueError, match=rf"freeze\.at_start={at_start} is not a number of blocks from 0 to the first"):
        FixedSchedule(num_frozen=[2, 4], at_start=at_start)

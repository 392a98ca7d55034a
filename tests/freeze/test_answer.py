"""An answer of a user's policy that is no decision about the model is refused, with the policy's class and numbers."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.resumes import FreezeAndUnfreeze

from pipetransformer.errors import UserError
from pipetransformer.freeze.answer import ask, ask_rates
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals

SIGNALS = Signals(2, 6, 3, {"gradient_norm": (0.0, 0.0, 0.0, 1.0, 1.0, 1.0)})


@dataclass(frozen=True, kw_only=True)
class Answers(FreezePolicy):
    answer: Any

    def decide(self, signals: Signals, state: dict[str, Any]) -> Any:
        return self.answer


def decision(num_frozen: Any) -> tuple[Decision, dict[str, Any]]:
    return Decision(num_frozen, "own", "a reason"), {"count": 1}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (decision(99), "num_frozen=99, and the model has 6 blocks; give a number from 0 to 6"),
        (decision(-1), "num_frozen=-1, and the model has 6 blocks; give a number from 0 to 6"),
        (decision(1.5), "num_frozen=1.5 (float); give a whole number of blocks"),
        (decision(None), "num_frozen=None (NoneType); give a whole number of blocks"),
        (decision(True), "num_frozen=True (bool); give a whole number of blocks"),
        (decision(2), "num_frozen=2 where 3 blocks are frozen, and its policy never unfreezes; give no fewer, or let"),
        (None, "None; end it with: return Decision(...), state"),
        (decision(4)[0], "a value of type Decision; end it with: return Decision(...), state"),
        ((Decision, {}), "(the class Decision, a value of type dict); end it with"),
        ((decision(4)[0], None), "(a value of type Decision, None); end it with"),
        ((4, {}), "(a value of type int, a value of type dict); end it with"),
        (
            (Decision(3, "own", "a reason", {"norm": torch.ones(())}), {}),
            "terms['norm'] of type Tensor, and a term is a number of the log; give a float, of a tensor its item()",
        ),
        ((Decision(3, "own", "a reason", None), {}), "None as terms of its decision; give numbers by name"),  # type: ignore[arg-type]
        ((Decision(3, "own", 5), {}), "a value of type int as reason of its decision; give a sentence"),  # type: ignore[arg-type]
        (
            (decision(3)[0], {"seen": np.ones(2)}),
            "a state that no checkpoint can hold (Object of type ndarray is not JSON serializable); give numbers",
        ),
    ],
)
def test_an_answer_that_is_no_decision_is_told_in_a_line(answer: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"at freeze decision 2 Answers.decide returned {message}")):
        ask(Answers(answer=answer), SIGNALS, {})


def test_a_decision_is_returned_as_it_is() -> None:
    assert ask(Answers(answer=decision(3)), SIGNALS, {}) == decision(3)
    assert ask(Answers(answer=decision(6)), SIGNALS, {}) == decision(6)
    found, _ = ask(Answers(answer=decision(np.int64(4))), SIGNALS, {})
    assert type(found.num_frozen) is int
    found, _ = ask(Answers(answer=(Decision(3, "own", "a reason", {"a": np.float32(0.5), "b": 2}), {})), SIGNALS, {})
    assert [(value, type(value)) for value in found.terms.values()] == [(0.5, float), (2, int)]


def test_a_policy_that_unfreezes_may_freeze_fewer() -> None:
    assert ask(FreezeAndUnfreeze(prefixes=[1]), SIGNALS, {})[0].num_frozen == 1


@pytest.mark.parametrize("state", [{8: 1.0}, {"first": [{8: 1.0}]}])
def test_a_key_that_a_checkpoint_makes_a_string_of_is_refused(state: dict[Any, Any]) -> None:
    with pytest.raises(UserError, match=re.escape("Answers.decide returned a state with the key 8 (int), and keys in")):
        ask(Answers(answer=(decision(3)[0], state)), SIGNALS, {})


def test_a_state_is_handed_on_as_a_checkpoint_gives_it_back() -> None:
    _, state = ask(Answers(answer=(decision(3)[0], {"seen": (1, 2)})), SIGNALS, {})
    assert state == {"seen": [1, 2]}


@dataclass(frozen=True, kw_only=True)
class Asks(FreezePolicy):
    asks: Any = ()
    at_start: Any = 0

    @property
    def signals(self) -> Any:
        return self.asks

    @property
    def frozen_at_start(self) -> Any:
        return self.at_start

    def decide(self, signals: Signals, state: dict[str, Any]) -> Any:
        return Decision(len(signals["plasticity"]), "own", "a reason"), state


def test_a_signal_that_is_read_and_not_asked_for_is_told_in_a_line() -> None:
    with pytest.raises(
        UserError, match="the signal 'plasticity' and does not ask for it; there are gradient_norm; let"
    ):
        ask(Asks(), SIGNALS, {})


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Asks(asks="plasticity"), "Asks.signals is the string 'plasticity'; give a tuple of names: ('plasticity',)"),
        (Asks(asks=None), "Asks.signals is None; give a tuple of names, or () for none"),
        (Asks(asks=(1,)), "Asks.signals is (1,); give a tuple of names, or () for none"),
        (Asks(at_start=-1), "Asks.frozen_at_start is -1; give a whole number of blocks, 0 or more"),
        (Asks(at_start=1.5), "Asks.frozen_at_start is 1.5; give a whole number of blocks, 0 or more"),
        (Asks(at_start=7), "freeze.at_start=7 is more than the 6 blocks of the model"),
    ],
)
def test_what_a_policy_asks_for_is_checked_before_a_run(policy: FreezePolicy, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        policy.check(6)
    Asks(asks=("plasticity",), at_start=6).check(6)


@dataclass(frozen=True, kw_only=True)
class Anneals(Answers):
    def rate_factors(self, progress: float, num_blocks: int) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((0.5, 1.0), "returned 2 numbers, and the model has 3 blocks; return one factor for each block"),
        (None, "returned None; return one factor for each block"),
        ([0.5, None, 1.0], "returned None for a block; return one factor for each block"),
        ([0.5, -1, 1.0], "returned the factor -1.0 for a block; give numbers of 0 or more"),
        ([0.5, float("nan"), 1.0], "returned the factor nan for a block; give numbers of 0 or more"),
        ([0.5, float("inf"), 1.0], "returned the factor inf for a block; give numbers of 0 or more"),
    ],
)
def test_rates_that_are_not_one_number_of_0_or_more_for_each_block_are_refused(answer: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape('Anneals.rate_factors ' + message)}$"):
        ask_rates(Anneals(answer=answer), 0.5, 3)
    assert ask_rates(Anneals(answer=np.array([0.0, 0.5, 1.0])), 0.5, 3) == [0.0, 0.5, 1.0]

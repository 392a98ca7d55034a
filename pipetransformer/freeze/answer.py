"""The answer of a policy to its signals. A policy may be the user's own, so it is checked before anything follows."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State


def ask(policy: FreezePolicy, signals: Signals, state: State) -> tuple[Decision, State]:
    """Returns what a policy decides, and its state for the next decision.

    Raises:
        UserError: The answer is no decision about this model, or cannot be logged or saved, with the policy's class and
            the numbers.
    """
    answer = policy.decide(signals, state)
    where = f"at freeze decision {signals.decision} {type(policy).__name__}.decide"
    if not _is_answer(answer):
        raise UserError(f"{where} returned {_kinds(answer)}; end it with: return Decision(...), state")
    decision, new_state = answer
    _check_prefix(decision.num_frozen, signals, where, policy.may_unfreeze)
    _check_words(decision, where)
    new_state = _saved_state(new_state, where)
    num_frozen, terms = int(decision.num_frozen), _plain_terms(decision.terms, where)  # numpy's are not JSON's
    return replace(decision, num_frozen=num_frozen, terms=terms), new_state


def ask_rates(policy: FreezePolicy, progress: float, num_blocks: int) -> list[float]:
    """Returns a policy's factor of the learning rate of each block.

    Raises:
        UserError: There is not one number of 0 or more for each, with the policy's class.
    """
    answer = policy.rate_factors(progress, num_blocks)
    where, remedy = f"{type(policy).__name__}.rate_factors", "return one factor for each block"
    if not isinstance(answer, Iterable):
        raise UserError(f"{where} returned {_kinds(answer)}; {remedy}")
    factors = [*answer]
    if len(factors) != num_blocks:
        raise UserError(f"{where} returned {len(factors)} numbers, and the model has {num_blocks} blocks; {remedy}")
    if others := [each for each in factors if not isinstance(each, Real)]:
        raise UserError(f"{where} returned {_kinds(others[0])} for a block; {remedy}")
    if wrong := [each for each in factors if not 0 <= each < math.inf]:
        raise UserError(f"{where} returned the factor {float(wrong[0])!r} for a block; give numbers of 0 or more")
    return [float(factor) for factor in factors]


def _is_answer(answer: Any) -> bool:
    is_pair = isinstance(answer, tuple | list) and len(answer) == 2
    return is_pair and isinstance(answer[0], Decision) and isinstance(answer[1], Mapping)


def _kinds(answer: Any) -> str:
    """Returns the types of what a policy returned, in words."""
    if isinstance(answer, type):
        return f"the class {answer.__name__}"
    if isinstance(answer, tuple | list):
        return f"({', '.join(map(_kinds, answer))})"
    return "None" if answer is None else f"a value of type {type(answer).__name__}"


def _check_prefix(num_frozen: Any, signals: Signals, where: str, may_unfreeze: bool) -> None:
    if isinstance(num_frozen, bool) or not isinstance(num_frozen, Integral):
        raise UserError(
            f"{where} returned num_frozen={num_frozen!r} ({type(num_frozen).__name__}); give a whole number of blocks"
        )
    if not 0 <= int(num_frozen) <= signals.num_blocks:
        raise UserError(
            f"{where} returned num_frozen={num_frozen}, and the model has {signals.num_blocks} blocks; give a number "
            f"from 0 to {signals.num_blocks}"
        )
    if int(num_frozen) < signals.num_frozen and not may_unfreeze:
        raise UserError(
            f"{where} returned num_frozen={num_frozen} where {signals.num_frozen} blocks are frozen, and its policy "
            "never unfreezes; give no fewer, or let the property may_unfreeze return True"
        )


def _check_words(decision: Decision, where: str) -> None:
    kinds = {"bound": (str, "a word"), "reason": (str, "a sentence"), "terms": (Mapping, "numbers by name")}
    for name, (kind, words) in kinds.items():
        value = getattr(decision, name)
        if not isinstance(value, kind):
            raise UserError(f"{where} returned {_kinds(value)} as {name} of its decision; give {words}")


def _plain_terms(terms: Mapping[str, Any], where: str) -> dict[str, float]:
    for name, value in terms.items():
        if not isinstance(value, Real):
            raise UserError(
                f"{where} returned terms[{name!r}] of type {type(value).__name__}, and a term is a number of the log; "
                "give a float, of a tensor its item()"
            )
    return {name: value if isinstance(value, int | float) else float(value) for name, value in terms.items()}


def _saved_state(state: Mapping[str, Any], where: str) -> State:
    """Returns the state as a checkpoint gives it back, so that a run that goes on decides as one that never stopped."""
    try:
        text = json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: it holds itself
        raise UserError(
            f"{where} returned a state that no checkpoint can hold ({error}); give numbers, strings, and lists and "
            "dictionaries of them"
        ) from error
    _check_keys(state, where)
    return json.loads(text)


def _check_keys(value: Any, where: str) -> None:
    """Raises an error for a key that JSON makes a string of, under which the policy would look in vain."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise UserError(
                    f"{where} returned a state with the key {key!r} ({type(key).__name__}), and keys in a checkpoint "
                    "are strings; give str(key)"
                )
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _check_keys(each, where)

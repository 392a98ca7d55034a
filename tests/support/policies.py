"""Tables of decisions that were computed by hand, and the way to hold a freeze policy against them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest

from pipetransformer.freeze import common
from pipetransformer.freeze.base import FreezePolicy, Signals

_freeze_below, _lowest_run = common.freeze_below, common.lowest_run


@dataclass(frozen=True, kw_only=True)
class Row:
    """A decision: what is measured before it, and what must come of it.

    Attributes:
        terms: Those of the decision that were computed.
    """

    num_frozen: int
    bound: str
    progress: float = 0.0
    rate: float = 1.0
    measured: dict[str, tuple[float, ...]] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)


def check_table(policy: FreezePolicy, num_blocks: int, table: Sequence[Row]) -> None:
    """Asserts that a policy decides as a table says. Before each decision it is resumed from JSON."""
    num_frozen, state = policy.frozen_at_start, policy.initial_state()
    for count, row in enumerate(table):
        for name, values in row.measured.items():
            assert name == "step_share" or not any(values[:num_frozen]), f"a frozen block is measured in row {count}"
        signals = Signals(count, num_blocks, num_frozen, row.measured, row.progress, row.rate)
        decision, state = replace(policy).decide(signals, json.loads(json.dumps(state)))
        assert (count, decision.num_frozen, decision.bound) == (count, row.num_frozen, row.bound), decision.reason
        assert {name: decision.terms[name] for name in row.terms} == pytest.approx(row.terms, abs=1e-12), decision
        num_frozen = decision.num_frozen


def check_mutation(policy: FreezePolicy, num_blocks: int, table: Sequence[Row]) -> None:
    """Asserts that a rule that was broken on purpose does not decide as the table says."""
    with pytest.raises(AssertionError):
        check_table(policy, num_blocks, table)


def at_most(module: str) -> mock._patch:
    """Lets the threshold itself freeze, in a policy that imports ``freeze_below``."""
    return mock.patch(
        f"{module}.freeze_below", lambda signals, changes, tau, name: _freeze_below(signals, changes, tau * 1.01, name)
    )


def no_reference_is_no_change(module: str) -> mock._patch:
    """Takes infinity for no change."""

    def broken(signals: Signals, changes: Sequence[float], tau: float, name: str) -> object:
        return _freeze_below(signals, [0.0 if change == float("inf") else change for change in changes], tau, name)

    return mock.patch(f"{module}.freeze_below", broken)


def not_in_a_row(module: str) -> mock._patch:
    """Counts calm blocks wherever they are."""

    def broken(signals: Signals, may_freeze: Sequence[bool]) -> int:
        return signals.num_frozen + sum(may_freeze[signals.num_frozen :])

    return mock.patch(f"{module}.lowest_run", broken)

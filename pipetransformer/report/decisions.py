"""Decisions, transitions and fills of the cache as rows: the same on a page and in a tracking service."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any

from pipetransformer.report.format import num_devices
from pipetransformer.report.sinks import Values

DECISION_COLUMNS = ("step", "decision", "bound", "reason", "num_frozen_before", "num_frozen", "taken_back")
PARTS = ("plan", "fill", "group", "move", "rebuild")
"""Parts of the seconds of a transition: choosing it, filling the cache, process groups, moves, and the new engine."""
TRANSITION_COLUMNS = (
    "step", "num_frozen_before", "num_frozen", "num_stages", "num_replicas", "mesh", "num_devices", "cache_level",
    "num_moves", "bytes_moved", "seconds", *(f"{part}_seconds" for part in PARTS), "predicted_gain_s",
    "predicted_cost_s",
)  # fmt: skip
Row = Iterable[Any]


def is_of_the_guard(decision: Values) -> bool:
    """Returns True for what the guard decided, not the policy."""
    return decision["bound"] == "guard"


def decision_rows(decisions: Sequence[Values]) -> list[Row]:
    """Returns a cell for each of :data:`DECISION_COLUMNS`, a row per decision in their order."""
    taken_back = _taken_back(decisions)
    return [
        (
            each["step"],
            _kind(each),
            each["bound"],
            each["reason"],
            each["num_frozen_before"],
            each["num_frozen"],
            is_back,
        )
        for each, is_back in zip(decisions, taken_back, strict=True)
    ]


def _kind(decision: Values) -> str:
    before, after = decision["num_frozen_before"], decision["num_frozen"]
    change = "freeze" if after > before else "unfreeze" if after < before else "keep"
    return f"guard: {change}" if is_of_the_guard(decision) else change


def _taken_back(decisions: Sequence[Values]) -> list[bool]:
    """Returns for each decision whether the guard has later unfrozen its blocks, or trained its steps again."""
    found, in_force = [False] * len(decisions), list[int]()  # of freezes that nothing has undone yet
    for number, decision in enumerate(decisions):
        undone = [one for one in in_force if decisions[one]["num_frozen"] > decision["num_frozen"]]
        if is_of_the_guard(decision):
            begin = decision["step"] if decision.get("num_steps_rolled_back") else inf
            undone += [one for one in range(number) if decisions[one]["step"] > begin]
            for one in undone:
                found[one] = True
        in_force = [one for one in in_force if one not in undone]
        if decision["num_frozen"] > decision["num_frozen_before"]:
            in_force.append(number)
    return found


def transition_rows(transitions: Sequence[Values]) -> Iterator[Row]:
    """Yields a cell for each of :data:`TRANSITION_COLUMNS`, a row per transition in their order."""
    for each in transitions:
        after = each["after"]
        yield (
            each["step"],
            each["before"]["num_frozen"],
            after["num_frozen"],
            len(after["stages"]),
            after["num_replicas"],
            after.get("mesh", ""),
            num_devices(after),
            after["cache_level"],
            each["num_moves"],
            each["bytes_moved"],
            each["seconds"],
            *(each.get(f"{part}_seconds") for part in PARTS),
            each.get("predicted_gain_s"),
            each.get("predicted_cost_s"),
        )

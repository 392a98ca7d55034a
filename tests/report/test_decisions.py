"""Decisions and transitions as rows: who decided, and what the guard took back."""

from typing import Any

from pipetransformer.report.decisions import (
    DECISION_COLUMNS,
    TRANSITION_COLUMNS,
    decision_rows,
    transition_rows,
)

from .conftest import Events


def decision(step: int, before: int, after: int, bound: str = "cap", **more: Any) -> dict[str, Any]:
    return {"step": step, "num_frozen_before": before, "num_frozen": after, "bound": bound, "reason": "why", **more}


def taken_back(*decisions: dict[str, Any]) -> list[int]:
    """The steps of the decisions that were taken back."""
    rows = [dict(zip(DECISION_COLUMNS, row, strict=True)) for row in decision_rows(decisions)]
    return [row["step"] for row in rows if row["taken_back"]]


def test_a_row_says_what_was_decided_and_by_whom() -> None:
    found = decision_rows([decision(8, 0, 2), decision(16, 2, 2), decision(24, 2, 1), decision(30, 1, 1, "guard")])
    assert [tuple(row)[:3] for row in found] == [
        (8, "freeze", "cap"),
        (16, "keep", "cap"),
        (24, "unfreeze", "cap"),
        (30, "guard: keep", "guard"),
    ]
    assert tuple(found[0])[3:] == ("why", 0, 2, False)


def test_the_guard_takes_back_the_freezes_above_what_it_leaves_frozen() -> None:
    first, second = decision(8, 0, 2), decision(16, 2, 4)
    assert taken_back(first, second, decision(20, 4, 2, "guard")) == [16]
    assert taken_back(first, second, decision(20, 4, 0, "guard")) == [8, 16]
    assert taken_back(first, second, decision(20, 4, 4, "guard")) == []
    assert taken_back(first, decision(10, 2, 0, "guard"), decision(20, 0, 2)) == [8], "the later freeze stands"


def test_what_the_policy_has_unfrozen_itself_the_guard_does_not_take_back() -> None:
    assert taken_back(decision(8, 0, 4), decision(12, 4, 1), decision(16, 1, 2), decision(20, 2, 1, "guard")) == [16]


def test_decisions_of_steps_that_are_trained_again_are_taken_back() -> None:
    back = decision(8, 2, 0, "guard", num_steps_rolled_back=8)
    assert taken_back(decision(8, 0, 2), decision(12, 2, 2), decision(16, 2, 2), back, decision(12, 0, 0)) == [
        8,
        12,
        16,
    ]


def test_a_transition_is_told_with_what_it_moved_and_took(events: Events) -> None:
    transitions = [values for event, values in events if event == "transition"]
    first, second = (dict(zip(TRANSITION_COLUMNS, row, strict=True)) for row in transition_rows(transitions))
    assert (first["step"], first["num_frozen_before"], first["num_frozen"]) == (8, 0, 2)
    assert (second["num_stages"], second["num_replicas"], second["num_devices"], second["cache_level"]) == (1, 4, 4, 4)
    on_mesh = {**transitions[1], "after": {**transitions[1]["after"], "mesh": "tp 2"}}
    (third,) = (dict(zip(TRANSITION_COLUMNS, row, strict=True)) for row in transition_rows([on_mesh]))
    assert (second["mesh"], third["mesh"]) == ("", "tp 2"), "earlier releases had none"
    assert (first["bytes_moved"], first["num_moves"], first["seconds"]) == (3 * 2**20, 5, 1.93)
    assert (first["move_seconds"], first["fill_seconds"]) == (1.2, None), "earlier releases did not write it"

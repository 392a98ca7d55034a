"""Steps noted by hand, in seconds, and the events that they make."""

from pipetransformer.autopipe.plan import Plan
from pipetransformer.report.trace import Event
from pipetransformer.runtime.tracing import Span
from pipetransformer.training.measured_step import Notes, measured_events

TWO_STAGES = Plan(0, 0, ((0, 1), (2, 3)), 1, 1)


def drawn(plan: Plan, *notes: Notes) -> list[tuple[str, float, float, int]]:
    """Name, start, end and rank of each event."""
    return [(event.name, event.start_s, event.end_s, event.rank) for event in measured_events(plan, notes)]


def of_rank(node: int, start_s: float, *spans: tuple[str, int, float, float]) -> Notes:
    """Spans of micro-batch 0 from kind, stage, start and end."""
    own = [Span(kind, stage, 0, start_s + begin, start_s + end) for kind, stage, begin, end in spans]
    return Notes(node, start_s, own)


def test_the_clocks_of_machines_are_set_by_the_barrier_and_a_transfer_lasts_until_it_is_used() -> None:
    below = of_rank(0, 100.0, ("forward", 0, 1, 2), ("backward", 0, 8, 10), ("optimizer", 0, 11, 12))
    above = of_rank(1, 7000.0, ("forward", 1, 3, 4), ("backward", 1, 4, 6), ("optimizer", 0, 11, 13))
    assert drawn(TWO_STAGES, below, above) == [
        ("F0", 1, 2, 0),
        ("send F0", 2, 3, 0),
        ("F0", 3, 4, 1),
        ("B0", 4, 6, 1),
        ("send B0", 6, 8, 1),
        ("B0", 8, 10, 0),
        ("optimizer", 11, 12, 0),
        ("optimizer", 11, 13, 1),
    ]


def test_ranks_of_one_machine_share_its_clock() -> None:
    below = of_rank(0, 100.0, ("forward", 0, 1, 2))
    late = Notes(0, 100.5, [Span("forward", 1, 0, 103.0, 104.0)])
    assert [event for event in drawn(TWO_STAGES, below, late) if event[3] == 1] == [("F0", 3, 4, 1)]


def test_a_transfer_to_a_busy_device_is_drawn_from_when_that_is_free() -> None:
    plan = Plan(0, 0, ((0, 1), (2, 3)), 1, 2)
    below = Notes(0, 0.0, [Span("forward", 0, 0, 0, 1), Span("forward", 0, 1, 1, 2)])
    above = Notes(0, 0.0, [Span("forward", 1, 0, 2, 5), Span("forward", 1, 1, 6, 9)])
    sends = [event for event in drawn(plan, below, above) if event[0].startswith("send")]
    assert sends == [("send F0", 1, 2, 0), ("send F1", 5, 6, 0)]


def test_a_gradient_is_sent_after_the_all_reduce_of_its_stage() -> None:
    plan = Plan(0, 0, ((0, 1), (2, 3)), 2, 1)
    below = of_rank(0, 0.0, ("forward", 0, 0, 1), ("backward", 0, 7, 8), ("all-reduce", 0, 8, 9))
    above = of_rank(0, 0.0, ("forward", 1, 2, 3), ("backward", 1, 3, 4), ("all-reduce", 1, 4, 6))
    events = drawn(plan, below, above, below, above)
    assert [event for event in events if event[3] == 1] == [
        ("F0", 2, 3, 1),
        ("B0", 3, 4, 1),
        ("all-reduce", 4, 6, 1),
        ("send B0", 6, 7, 1),
    ]
    assert [event[:3] for event in events if event[3] == 3] == [event[:3] for event in events if event[3] == 1]


def test_a_stage_without_active_layers_has_no_backward_pass_and_gets_no_gradient() -> None:
    plan = Plan(1, 0, ((0, 1), (2, 3)), 1, 1)
    below = of_rank(0, 0.0, ("forward", 0, 0, 1), ("backward", 0, 5, 5.1))
    above = of_rank(0, 0.0, ("forward", 1, 2, 3), ("backward", 1, 3, 4))
    assert [event[0] for event in drawn(plan, below, above)] == ["F0", "send F0", "F0", "B0"]


def test_passes_of_devices_with_several_stages_name_theirs() -> None:
    plan = Plan(0, 0, ((0, 0), (1, 1), (2, 2), (3, 3)), 1, 1, "interleaved1f1b", stages_per_rank=2)
    even = of_rank(0, 0.0, ("forward", 0, 0, 1), ("forward", 2, 4, 5))
    odd = of_rank(0, 0.0, ("forward", 1, 2, 3), ("forward", 3, 6, 7))
    assert [event[0] for event in drawn(plan, even, odd)] == [
        "F0 stage 0",
        "send F0 stage 0",
        "F0 stage 1",
        "send F0 stage 1",
        "F0 stage 2",
        "send F0 stage 2",
        "F0 stage 3",
    ]


def test_a_device_that_waits_for_nobody_leaves_no_gap_to_draw() -> None:
    between_machines = of_rank(0, 0.0, ("forward", 0, 0, 2.0)), of_rank(1, 0.0, ("forward", 1, 1.9, 3.0))
    events = measured_events(TWO_STAGES, between_machines)
    assert Event("send F0", 1.9, 0.0, 0, "transfer") in events, "clocks that differ make no negative times"

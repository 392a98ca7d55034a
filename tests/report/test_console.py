"""The two views of a run: lines of text, and a terminal."""

import io
import re
from typing import Any

import pytest
import rich.console

from pipetransformer.report.console import Console
from pipetransformer.report.plain import PlainLog
from pipetransformer.report.reporter import Sink
from pipetransformer.report.terminal import Terminal

Events = list[tuple[str, dict[str, Any]]]


def play(sink: Sink, events: Events) -> None:
    for event, values in events:
        sink.write(event, values)
    sink.close()


def drawn(events: Events, width: int = 100) -> str:
    """What a terminal shows, without its control codes."""
    file = io.StringIO()
    play(Terminal(rich.console.Console(file=file, force_terminal=True, width=width, color_system=None)), events)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def printed(events: Events, capsys: pytest.CaptureFixture[str], log_every_steps: int = 1000) -> list[str]:
    play(PlainLog(log_every_steps), events)
    return [line.split("] ", maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]


def step_lines(lines: list[str]) -> list[int]:
    return [int(match[1]) for line in lines if (match := re.match(r"step (\d+)/24 ", line))]


def test_the_log_prints_a_step_line_every_so_many_steps_and_at_the_end_of_an_epoch(
    events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step_lines(printed(events, capsys)) == [8, 16, 24]
    assert step_lines(printed(events, capsys, log_every_steps=5)) == [5, 8, 10, 15, 16, 20, 24]


def test_slow_steps_are_printed_so_that_the_log_is_never_silent_for_long(
    events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [(event, values | {"step_seconds": 4.0} if event == "step" else values) for event, values in events]
    assert step_lines(printed(slow, capsys)) == [3, 6, 8, 11, 14, 16, 19, 22, 24]


def test_the_log_explains_decisions_and_transitions_in_one_line_each(
    events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(events, capsys)
    assert any(line.startswith("decision at step 16: 2 -> 4 blocks frozen, bound by cap") for line in lines)
    assert "gradient norms per block: - - 0.4 0.8 1.6 3.2" in lines
    (transition,) = [line for line in lines if line.startswith("transition at step 16")]
    assert "layers per stage embedding-4 | 5-head -> 5-head" in transition
    assert "moved 3 MiB in 5 moves" in transition
    assert "schedule" not in transition, "what stays as it was is left out"


@pytest.mark.parametrize("view", ["terminal", "plain"])
def test_every_kind_of_event_is_shown(view: str, events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    shown = drawn(events) if view == "terminal" else "\n".join(printed(events, capsys))
    for words in (
        "8 steps/epoch x 3 epochs = 24 steps",
        "decision at step 8: 0 -> 2 blocks frozen",
        "transition at step 16: 2 stages x 2 replicas -> 1 stage x 4 replicas",
        "output of block 4 from the input",
        "test at step 24: accuracy 0.74, f1 0.64",
        "the cache is off: random crops",
        "2.04 times the best static plan",
        "embedding-4 | 5-head",
    ):
        assert words in shown


@pytest.mark.parametrize("view", ["terminal", "plain"])
def test_a_warning_is_shown_once(view: str, capsys: pytest.CaptureFixture[str]) -> None:
    warnings: Events = [("warning", {"message": f"[slow] {name}"}) for name in ("disk", "disk", "link", "disk")]
    shown = drawn(warnings) if view == "terminal" else "\n".join(printed(warnings, capsys))
    assert [shown.count("[slow] disk"), shown.count("[slow] link")] == [1, 1]


def test_the_terminal_draws_the_gradient_norm_of_each_active_block(events: Events) -> None:
    row = next(line for line in drawn(events).splitlines() if line.count("-   ") >= 2 and "6 █ 3.2" in line)
    assert re.findall(r"\d [▁▂▃▄▅▆▇█] [\d.]+", row) == ["3 ▂ 0.4", "4 ▃ 0.8", "5 ▅ 1.6", "6 █ 3.2"]


def test_a_reason_that_stands_in_the_decision_is_not_repeated_in_the_transition(events: Events) -> None:
    assert "because  2 more blocks frozen" in drawn(events)
    reasons = {"transition": "froze two", "decision": "froze two"}
    same = [(event, values | {"reason": reasons[event]} if event in reasons else values) for event, values in events]
    assert drawn(same).count("froze two") == 2, "two decisions, each with a transition"


def test_the_terminal_shows_the_step_and_the_time_left(events: Events) -> None:
    shown = drawn(events[:4])
    assert "step 3/24" in shown
    assert "left 8.4 s" in shown
    assert "loss 0.7667" in shown


@pytest.mark.parametrize("width", [60, 80, 140])
def test_nothing_is_wider_than_the_terminal(events: Events, width: int) -> None:
    assert max(len(line) for line in re.split(r"[\r\n]", drawn(events, width))) <= width


def test_a_run_that_failed_ends_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    failed: Events = [("summary", {"status": "failed", "error": "cannot read [digits]"})]
    assert "cannot read [digits]" in drawn(failed)
    assert printed(failed, capsys) == ["status: failed", "error: cannot read [digits]"]


def test_the_console_prints_lines_where_there_is_no_terminal(
    events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    play(Console(log_every_steps=1000), events)
    out = capsys.readouterr().out
    assert re.match(r"\[\d\d:\d\d:\d\d\] model: vit_tiny", out)


def test_the_console_draws_on_a_terminal(
    events: Events, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    play(Console(log_every_steps=1000), events)
    assert "╭─ pipetransformer" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)

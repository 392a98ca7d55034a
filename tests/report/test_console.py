"""The two views of a run: lines of text, and a terminal."""

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rich.console

from pipetransformer.report import run_folder
from pipetransformer.report.event_log import EVENT_LOG, read_lines
from pipetransformer.report.plain import PlainLog
from pipetransformer.report.reporter import (
    ERASE_LINE,
    ConsoleOptions,
    open_console,
    print_line,
    print_phase,
    show_phase,
)
from pipetransformer.report.sinks import EVENTS, EventName, Sink
from pipetransformer.report.summary_text import PLAN_COLUMNS
from pipetransformer.report.terminal import NUM_EVALUATIONS, Terminal

Events = list[tuple[EventName, dict[str, Any]]]


def play(sink: Sink, events: Events) -> None:
    for event, values in events:
        sink.write(event, values)
    sink.close()


def drawn(events: Events, width: int = 100, verbose: bool = True) -> str:
    """Returns what a terminal shows, without its control codes."""
    file = io.StringIO()
    console = rich.console.Console(file=file, force_terminal=True, width=width, color_system=None)
    play(Terminal(console, verbose), events)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def left_on_screen(events: Events, width: int = 80) -> list[str]:
    """Returns the lines that stay on a terminal when the run is over, without its live lines."""
    file = io.StringIO()
    console = rich.console.Console(file=file, force_terminal=False, width=width)
    play(Terminal(console), events)
    return [line.rpartition(ERASE_LINE)[2].rstrip() for line in file.getvalue().split("\n")]


class Clock:
    """Seconds that pass as the steps say."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def printed(
    events: Events,
    capsys: pytest.CaptureFixture[str],
    log_every_s: float = 1000.0,
    log_every_steps: int | None = None,
    step_s: float = 1.0,
) -> list[str]:
    """Returns the lines of a log in which every step takes so many seconds, without their time stamps."""
    clock = Clock()
    log = PlainLog(log_every_s, log_every_steps, clock)
    for event, values in events:
        clock.now_s += step_s if event == "step" else 0.0
        log.write(event, values)
    log.close()
    return [line.split("] ", maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]


def step_lines(lines: list[str]) -> list[int]:
    return [int(match[1]) for line in lines if (match := re.match(r"step (\d+)/24 ", line))]


def test_the_log_prints_steps_by_time_and_the_last_one(events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    assert step_lines(printed(events, capsys)) == [24]
    assert step_lines(printed(events, capsys, log_every_s=7)) == [7, 14, 21, 24]
    assert step_lines(printed(events, capsys, log_every_s=7, step_s=4)) == list(range(2, 25, 2))


def test_the_log_prints_every_so_many_steps_where_that_is_asked_for(
    events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step_lines(printed(events, capsys, log_every_steps=10)) == [10, 20, 24]


def test_the_log_tells_a_transition_in_short_lines(events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(events, capsys)
    assert "freeze at step 16: 2 -> 4 of 6 blocks (at most a third of the active blocks)" in lines
    assert "gradient norms per block: - - 0.4 0.8 1.6 3.2" in lines
    begin = lines.index(
        "transition at step 16: arrangement 2 stages x 2 replicas -> 1 stage x 4 replicas; "
        "read from cache nothing -> block 4; layers per stage embedding-4 | 5-head -> 5-head; micro-batches 2 -> 1"
    )
    assert lines[begin + 1 : begin + 5] == [
        "  step: frozen blocks alone 130 ms -> 130 ms; new arrangement and cache 130 ms -> 80 ms (predicted)",
        "  worth it: saves 400 ms until the end of the run, takes 710 ms (predicted)",
        "  took: 1.9 s (group 110 ms, move 1.2 s, rebuild 600 ms)",
        "  moved: 3 MiB in 5 moves: 4-6 from rank 1 to 0, 6 from rank 1 to 2, head from rank 3 to 2",
    ]
    told = "\n".join(lines)
    assert told.count("at most a third of the active blocks") == 2, "two decisions, each with a transition"


@pytest.mark.parametrize("view", ["terminal", "plain"])
def test_every_kind_of_event_is_shown(view: str, events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    resumed = {"step": 24, "checkpoint": "checkpoints/step-00000024", "num_steps_lost": 3}
    events.insert(-1, ("checkpoint", {"step": 24, "path": resumed["checkpoint"], "seconds": 0.2, "bytes": 2**20}))
    events.insert(-1, ("resume", dict(events[1][1]) | resumed))
    plan = {"num_stages": 2, "num_replicas": 1, "num_frozen": 0, "cache_level": 0}
    times = {"measured_step_s": 0.054, "predicted_step_s": 0.036, "num_steps": 6}
    events.insert(-1, ("plan_timed", {"step": 8, **plan, **times}))
    lines = drawn(events) if view == "terminal" else "\n".join(printed(events, capsys))
    shown = " ".join(lines.split())
    assert {event for event, _ in events} == set(EVENTS)
    for words in (
        "reading data ...",
        "8 steps per epoch x 3 epochs = 24 steps",
        "freeze at step 8: 0 -> 2 of 6 blocks",
        "1 stage x 4 replicas",
        "output of block 4 from the input",
        "test at step 24: accuracy 0.74, f1 0.64",
        "the cache is off: random crops",
        "resumed at step 24 from checkpoints/step-00000024; 3 steps after it are repeated",
        "timed at step 8: 54 ms per step, 36 ms predicted (2 stages x 1 replica)",
        "2.0 times the best static plan",
        "embedding-4 | 5-head",
    ):
        assert words in shown


@pytest.mark.parametrize("view", [Terminal(rich.console.Console()), PlainLog(10.0)], ids=["terminal", "plain"])
def test_an_event_that_a_view_does_not_know_is_an_error(view: Sink) -> None:
    with pytest.raises(KeyError, match="lunch"):
        view.write("lunch", {})  # pyrefly: ignore[bad-argument-type]


def evaluations(*accuracies: float) -> Events:
    return [
        ("evaluate", {"step": step, "split": "test", "num_samples": 10, "seconds": 1.0, "metrics": {"accuracy": value}})
        for step, value in enumerate(accuracies)
    ]


@pytest.mark.parametrize(("verbose", "steps"), [(False, "0257"), (True, "0123456789")])
def test_the_terminal_prints_the_best_evaluations_and_verbose_all(verbose: bool, steps: str, events: Events) -> None:
    start = ("start", events[1][1] | {"num_steps": 10})
    values = (0.5, 0.25, 0.75, 0.75, 0.5, 0.8, 0.7, 0.9, 0.95, 0.1)
    shown = drawn([start, *evaluations(*values)], verbose=verbose)
    assert re.findall(r"test at step \d: accuracy [\d.]+", shown) == [
        f"test at step {step}: accuracy {values[int(step)]}" for step in steps
    ]


def test_the_terminal_keeps_the_last_and_the_best_metric_in_its_live_lines(events: Events) -> None:
    step = next((event, values) for event, values in events if event == "step")
    assert "test accuracy 0.25 (best 0.5)" in drawn([events[1], *evaluations(0.5, 0.25), step])


def test_the_terminal_follows_the_metric_that_is_asked_for(events: Events) -> None:
    step = next((event, values) for event, values in events if event == "step")
    start = ("start", events[1][1] | {"main_metric": {"split": "test", "name": "loss"}})
    scores = [{"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.75, "loss": 2.0}]
    both = [
        (event, values | {"metrics": metrics})
        for (event, values), metrics in zip(evaluations(0, 0), scores, strict=True)
    ]
    assert "test loss 2 (best 1)" in drawn([start, *both, step])


def test_the_log_prints_every_evaluation(events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in printed([events[1], *evaluations(0.5, 0.25, 0.75)], capsys) if "accuracy" in line]
    assert [line.endswith(", the best so far") for line in lines] == [True, False, True]


def test_a_resumed_run_knows_the_best_metric_of_the_time_before(
    events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    best = {"test": {"name": "accuracy", "value": 0.8, "split": "test", "step": 8}}
    known = {"step": 8, "checkpoint": "step-8", "num_steps_lost": 0, "best": best}
    resume = ("resume", events[1][1] | known)
    lines = [line for line in printed([resume, *evaluations(0.5, 0.9)], capsys) if "accuracy" in line]
    assert [line.endswith(", the best so far") for line in lines] == [False, True]
    assert best["test"]["value"] == 0.8, "the event stays as it is"


@pytest.mark.parametrize("isatty", [False, True])
def test_output_that_nobody_takes_any_more_ends_nothing(isatty: bool, tmp_path: Path) -> None:
    """A pipe whose reader has ended, in a process of its own: pytest takes the output of this one."""
    script = """
import os, sys
from pipetransformer.report.reporter import ConsoleOptions, open_report, print_line, print_phase
from pipetransformer.report.wandb import NoLogger
from pathlib import Path

reading, writing = os.pipe()
os.dup2(writing, 1)
os.close(writing)
os.close(reading)
if sys.argv[1] == "True":
    sys.stdout.isatty = lambda: True
report = open_report(NoLogger(), Path(sys.argv[2]), {}, console=ConsoleOptions())
report.phase("reading data")
print_phase("measuring")
print_line("a line")
report.write("warning", message="a warning")
report.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(isatty), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [event["message"] for event in read_lines(tmp_path / EVENT_LOG)] == ["reading data", "a warning"]


@pytest.mark.parametrize("view", ["terminal", "plain"])
def test_a_warning_is_shown_once(view: str, capsys: pytest.CaptureFixture[str]) -> None:
    warnings: Events = [("warning", {"message": f"[slow] {name}"}) for name in ("disk", "disk", "link", "disk")]
    shown = drawn(warnings) if view == "terminal" else "\n".join(printed(warnings, capsys))
    assert [shown.count("[slow] disk"), shown.count("[slow] link")] == [1, 1]


def test_the_terminal_draws_the_gradient_norm_of_each_active_block(events: Events) -> None:
    row = next(line for line in drawn(events).splitlines() if line.count("-   ") >= 2 and "6 █ 3.2" in line)
    assert re.findall(r"\d [▁▂▃▄▅▆▇█] [\d.]+", row) == ["3 ▂ 0.4", "4 ▃ 0.8", "5 ▅ 1.6", "6 █ 3.2"]


def test_the_panel_is_titled_by_what_froze_and_shows_what_changes(events: Events) -> None:
    kept = [
        (event, values | {"after": values["before"] | {"num_frozen": 5}} if event == "transition" else values)
        for event, values in events
    ]
    shown = drawn(kept)
    assert "─ freeze at step 8: 0 -> 5 blocks, arrangement kept ─" in shown
    panel = shown[shown.index("freeze at step 8: 0 -> 5") : shown.index("freeze at step 16: 2 -> 4 of")]
    assert "schedule" not in panel
    assert "layers per stage" not in panel
    assert "1f1b" not in panel


def test_a_reason_is_told_once(events: Events) -> None:
    reasons = {"transition": "froze two", "decision": "froze two"}
    same = [(event, values | {"reason": reasons[event]} if event in reasons else values) for event, values in events]
    assert drawn(same).count("froze two") == 2, "two decisions, each with a transition"


def test_the_terminal_shows_the_step_and_the_time_left(events: Events) -> None:
    shown = drawn(events[:5])
    assert "step 3/24" in shown
    assert "left 8.4 s" in shown
    assert "loss 0.7667" in shown


def test_no_word_of_the_summary_is_lost_at_eighty_columns(events: Events) -> None:
    shown = drawn(events, 80)
    summary = shown[shown.index("─ summary ─") :]
    assert "…" not in shown
    for column in PLAN_COLUMNS:
        assert column in summary
    assert {"embedding-1", "2-3", "4-5", "6-head"} <= set(summary.split())


def test_a_run_ends_with_its_model_and_what_to_do_next(
    events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text('{"architecture": "vit_tiny"}')
    (tmp_path / "run" / "wandb" / "offline-run-1").mkdir(parents=True)
    events[1] = "start", events[1][1] | {"run_dir": str(tmp_path / "run")}
    events[-1] = "summary", events[-1][1] | {"model": {"folder": str(tmp_path / "run" / "model"), "step": 24}}
    expected = [
        "model: run/model  (timm.create_model('local-dir:run/model', pretrained=True))",
        "W&B: wandb sync run/wandb/offline-run-1",
        "figures: python -m pipetransformer.report run",
    ]
    assert printed(events, capsys)[-3:] == expected
    assert drawn(events, 40).split()[-len(" ".join(expected).split()) :] == " ".join(expected).split()


@pytest.mark.parametrize("width", [60, 80, 140])
def test_nothing_is_wider_than_the_terminal(events: Events, width: int) -> None:
    assert max(len(line) for line in re.split(r"[\r\n]", drawn(events, width))) <= width


def test_every_part_of_a_resumed_run_is_named_for_the_service(tmp_path: Path) -> None:
    for name in ("offline-run-20260101_000000-x", "offline-run-20260102_000000-x"):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    ((label, command), _) = run_folder.next_steps(tmp_path, {})
    assert label == "W&B"
    assert [Path(part).name for part in command.split()[2:]] == [
        "offline-run-20260101_000000-x",
        "offline-run-20260102_000000-x",
    ]


def test_a_run_that_failed_ends_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    failed: Events = [("summary", {"status": "failed", "error": "cannot read [digits]"})]
    assert "cannot read [digits]" in drawn(failed)
    assert printed(failed, capsys) == ["status: failed", "error: cannot read [digits]"]


def test_the_console_prints_lines_where_there_is_no_terminal(
    events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    play(open_console(ConsoleOptions()), events)
    out = capsys.readouterr().out
    assert re.search(r"^\[\d\d:\d\d:\d\d\] model: vit_tiny", out, re.MULTILINE)


def test_the_console_draws_on_a_terminal(
    events: Events, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    play(open_console(ConsoleOptions(verbose=True)), events)
    assert "╭─ pipetransformer" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)


def test_a_phase_of_the_launcher_looks_like_one_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    print_phase("starting 2 processes")
    PlainLog(10.0).write("phase", {"message": "starting 2 processes"})
    first, second = capsys.readouterr().out.splitlines()
    assert re.match(r"\[\d\d:\d\d:\d\d\] starting 2 processes \.\.\.$", first)
    assert first[10:] == second[10:]


def test_a_run_leaves_one_screen(events: Events) -> None:
    """The events of a run, with 24 more evaluations of which each is the best so far."""
    many = evaluations(*(0.75 + step / 1000 for step in range(24)))
    lines = left_on_screen([*events[:-1], *many, events[-1]])
    assert lines[:7] == [
        "vit_tiny: 5,526,346 parameters, 6 blocks; digits, classification",
        "8 steps per epoch x 3 epochs = 24 steps of 64 samples; 4 stages x 1 replica = 4",
        "devices, 400 ms per step predicted",
        "folder: runs/one",
        "test at step 8: accuracy 0.58, f1 0.48 (1,000 samples in 700 ms)",
        "freeze at step 8: 0 -> 2 of 6 blocks (at most a third of the active blocks)",
        "  2 stages x 2 replicas: 400 ms -> 130 ms per step predicted, took 1.9 s",
    ]
    assert "  1 stage x 4 replicas, block 4 from the cache: 130 ms -> 80 ms per step" in lines
    assert sum("test at step" in line for line in lines) <= NUM_EVALUATIONS
    assert len(lines) <= 30


def test_phases_share_one_line_that_the_start_replaces() -> None:
    phases: Events = [("phase", {"message": name}) for name in ("reading data", "measuring layers")]
    shown = "".join(left_on_screen([*phases, ("warning", {"message": "slow"})]))
    assert shown == "warning: slow"


def test_a_long_phase_does_not_break_into_two_lines() -> None:
    file = io.StringIO()
    show_phase("x" * 100, file, width=80)
    assert file.getvalue() == ERASE_LINE + "x" * 79


def test_a_line_of_the_launcher_stays(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("restart 1 of 3")
    assert capsys.readouterr().out.endswith("restart 1 of 3\n")

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.report.event_log import EVENT_LOG
from pipetransformer.report.reporter import LoggerSpec, Reporter, open_report
from pipetransformer.report.sinks import EventName, NullSink, Sink, Thinned, Values


class Recorder(Sink):
    def __init__(self, failure: Exception | None = None) -> None:
        self.received: list[tuple[EventName, Values]] = []
        self.num_closed = 0
        self._failure = failure

    def write(self, event: EventName, values: Values) -> None:
        self.received.append((event, values))

    def close(self) -> None:
        self.num_closed += 1
        if self._failure:
            raise self._failure


def test_every_sink_receives_every_event() -> None:
    sinks = [Recorder(), Recorder()]
    reporter = Reporter(sinks)
    reporter.write("warning", message="one")
    reporter.write("step", step=1)
    for sink in sinks:
        assert sink.received == [("warning", {"message": "one"}), ("step", {"step": 1})]


def test_without_sinks_events_go_nowhere() -> None:
    reporter = Reporter()
    reporter.write("step", step=1)
    reporter.close()


def test_an_event_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(AssertionError, match="stepp"):
        Reporter().write("stepp", step=1)  # pyrefly: ignore[bad-argument-type]


def test_a_phase_is_an_event() -> None:
    sink = Recorder()
    Reporter([sink]).phase("reading data")
    assert sink.received == [("phase", {"message": "reading data"})]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_closing_reaches_all_sinks_even_when_one_fails(failing: int) -> None:
    sinks = [Recorder(OSError("disk full") if index == failing else None) for index in range(3)]
    with pytest.raises(OSError, match="disk full"):
        Reporter(sinks).close()
    assert [sink.num_closed for sink in sinks] == [1, 1, 1]


class Failing(Recorder):
    """Fails at one of its calls."""

    def __init__(self, fails_at: str) -> None:
        super().__init__(OSError("no\nroute") if fails_at == "close" else None)
        self._fails_at = fails_at

    def write(self, event: EventName, values: Values) -> None:
        super().write(event, values)
        if event == self._fails_at:
            raise ConnectionError("no\nroute")

    def identity(self) -> dict[str, Any]:
        if self._fails_at == "identity":
            raise ConnectionError("no\nroute")
        return {"id": 1}


@dataclass(frozen=True, kw_only=True)
class OwnLogger(LoggerSpec):
    sink: Sink

    def open(self, run_dir: Path, *_: Any) -> Sink:
        return self.sink


@pytest.mark.parametrize("fails_at", ["identity", "step", "close"])
def test_a_tracking_service_that_fails_is_told_of_once_and_the_run_goes_on(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipetransformer.report.reporter.open_console", lambda _: NullSink())
    sink = Failing(fails_at)
    report = open_report(OwnLogger(sink=sink), tmp_path, {})
    assert report.identity() == ({} if fails_at == "identity" else {"id": 1})
    for step in (1, 2):
        report.write("step", step=step)
    report.write("phase", message="saving")
    report.close()
    events = [json.loads(line) for line in (tmp_path / EVENT_LOG).read_text().splitlines()]
    assert [each["step"] for each in events if each["event"] == "step"] == [1, 2]
    (warning,) = (each["message"] for each in events if each["event"] == "warning")
    kind = "OSError" if fails_at == "close" else "ConnectionError"
    assert warning.startswith(f"the logger failed and gets no more of this run ({kind}: no route)")
    assert [event for event, _ in sink.received] == {"identity": [], "step": ["step"]}.get(
        fails_at, ["step", "step", "phase"]
    )
    assert sink.num_closed == (2 if fails_at == "close" else 1)


def test_the_null_sink_takes_anything() -> None:
    sink = NullSink()
    sink.write("step", {})
    sink.close()


def test_the_time_of_the_sinks_is_counted_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 2.0, 2.5])  # a phase only begins
    monkeypatch.setattr("pipetransformer.report.reporter.time.perf_counter", lambda: next(seconds))
    reporter = Reporter([Recorder()])
    reporter.phase("reading data")
    assert reporter.seconds == 0
    reporter.write("step", step=1)
    assert reporter.seconds == 0.5


NUM_STEPS = 400


class Clock:
    """A time that passes where a sink works and between two steps."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Recorder):
    def __init__(self, clock: Clock, costs: Iterator[float]) -> None:
        super().__init__()
        self._clock, self._costs, self.spent_s = clock, costs, 0.0

    def write(self, event: EventName, values: Values) -> None:
        super().write(event, values)
        cost = next(self._costs)
        self._clock.now += cost
        self.spent_s += cost * (event != "start")

    @property
    def steps(self) -> list[int]:
        return [values["step"] for event, values in self.received if event == "step"]


def thinned(share: float | None, step_s: float, costs: Iterator[float]) -> tuple[Slow, float]:
    """Returns what a slow sink got of a run, and how long that took."""
    clock = Clock()
    sink = Slow(clock, costs)
    thin = Thinned(sink, share, clock)
    thin.write("start", {"num_steps": NUM_STEPS})
    begin = clock.now
    for step in range(1, NUM_STEPS + 1):
        clock.now += step_s
        thin.write("step", {"step": step})
        if step % 100 == 0:
            thin.write("evaluate", {"step": step})
    return sink, clock.now - begin


@given(st.integers(0, 2**32), st.floats(0.001, 1), st.floats(0.001, 0.1))
def test_a_service_takes_no_more_than_its_share_of_the_run(seed: int, step_s: float, share: float) -> None:
    random = Random(seed)
    costs = [random.uniform(0.0001, 0.05) for _ in range(500)]
    sink, run_s = thinned(share, step_s, iter(costs))
    always = [each for (event, values), each in zip(sink.received, costs, strict=False) if passes_always(event, values)]
    assert sink.spent_s <= share * run_s + max(costs) + sum(always)
    assert sink.steps[0] == 1
    assert sink.steps[-1] == NUM_STEPS, "a chart goes to the end of the run"
    assert sum(event == "evaluate" for event, _ in sink.received) == 4


def passes_always(event: EventName, values: Values) -> bool:
    return event == "evaluate" or values.get("step") == NUM_STEPS


def test_slow_steps_all_reach_the_service_and_fast_ones_evenly() -> None:
    slow, _ = thinned(0.005, 1.0, repeat(0.004))
    assert slow.steps == [*range(1, NUM_STEPS + 1)]
    fast, _ = thinned(0.005, 0.016, repeat(0.004))
    gaps = {after - before for before, after in pairwise(fast.steps[:-1])}
    assert gaps <= {*range(45, 105)}, gaps
    everything, _ = thinned(None, 0.016, repeat(0.004))
    assert everything.steps == [*range(1, NUM_STEPS + 1)]

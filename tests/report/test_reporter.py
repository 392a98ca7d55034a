import pytest

from pipetransformer.report.reporter import EventName, NullSink, Reporter, Sink, Values


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

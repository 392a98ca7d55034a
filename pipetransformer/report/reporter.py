"""The way of a run's events: the trainer writes each event once, and every sink shows it in its own way."""

from __future__ import annotations

import logging
import math
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, get_args

from pipetransformer.errors import UserError
from pipetransformer.report.secrets import redact, redact_event

Values = dict[str, Any]
EventName = Literal[
    "phase", "start", "resume", "step", "plan_timed", "decision", "transition", "cache_plan", "cache_fill", "evaluate",
    "checkpoint", "warning", "summary",
]  # fmt: skip
EVENTS: tuple[EventName, ...] = get_args(EventName)
BEFORE_THE_STEPS: tuple[EventName, ...] = ("phase", "start", "resume")
MAX_SHARE = 0.003  # of a run's time, for its tracking service
Shown = TypeVar("Shown")
ERASE_LINE = "\r\x1b[2K"  # for the line that a terminal's cursor is on
Handlers = dict[EventName, Callable[[Values], Shown]]


class Sink(ABC):
    """One place where events go. Lives in the main process of rank 0."""

    @abstractmethod
    def write(self, event: EventName, values: Values) -> None:
        """Takes an event with plain values that JSON can hold."""

    def flush(self) -> None:  # noqa: B027
        """Writes what has been taken and is held back, where a sink does so."""

    def identity(self) -> dict[str, Any]:
        """Returns what :meth:`LoggerSpec.open` takes to go on with the same run; empty where nothing is needed.

        It is asked once, before the first event, and goes into every checkpoint.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Releases files, terminals and connections at the end of the run, whether it succeeded or not."""


def handlers(view: Sink) -> Handlers[Any]:
    """Returns a view's method for each event: ``_phase``, ``_start`` and so on; all of them have to be there."""
    return {event: getattr(view, f"_{event}") for event in EVENTS}


class NullSink(Sink):
    """Shows nothing."""

    def write(self, event: EventName, values: Values) -> None:
        pass

    def close(self) -> None:
        pass


class LoggedWarnings(Sink):
    """Hands the warnings of a run to Python's ``logging``, which prints them to stderr unless the script sets it up."""

    def write(self, event: EventName, values: Values) -> None:
        if event == "warning":
            logging.getLogger("pipetransformer").warning(values["message"])

    def close(self) -> None:
        pass


class Sinks(Sink):
    """Several tracking services as one.

    Args:
        sinks: In the order in which they take an event.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.parts = tuple(sinks)

    def write(self, event: EventName, values: Values) -> None:
        for sink in self.parts:
            sink.write(event, values)

    def flush(self) -> None:
        for sink in self.parts:
            sink.flush()

    def identity(self) -> dict[str, Any]:
        return {name: value for sink in self.parts for name, value in sink.identity().items()}

    def close(self) -> None:
        """Closes all, the last one first, also after one of them has failed; then raises that failure."""
        with ExitStack() as stack:
            for sink in self.parts:
                stack.callback(sink.close)


class Thinned(Sink):
    """A sink that leaves out steps where they come faster than it takes them.

    A step passes as long as the sink has taken at most ``share`` of the time since the start of the run, for whatever
    events; the first step, the last one and all other events always pass. A service that takes 4 ms per row sees every
    step of 0.8 s at a share of 0.005, and one of 50 where they take 16 ms.

    Args:
        sink: Of a tracking service.
        share: Largest part of the time; ``None`` lets every step pass.
        clock: Seconds since any fixed moment.
    """

    def __init__(
        self, sink: Sink, share: float | None = MAX_SHARE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sink, self._share, self._clock = sink, math.inf if share is None else share, clock
        self._since, self._spent_s = clock(), 0.0
        self._num_steps: int | None = None

    def write(self, event: EventName, values: Values) -> None:
        begin = self._clock()
        if event in ("start", "resume"):
            self._since, self._num_steps = begin, values.get("num_steps")
        elif event == "step" and self._leaves_out(values["step"], begin - self._since):
            return
        self._sink.write(event, values)
        if event not in BEFORE_THE_STEPS:
            self._spent_s += self._clock() - begin

    def _leaves_out(self, step: int, elapsed_s: float) -> bool:
        return self._spent_s > self._share * elapsed_s and step != self._num_steps

    def flush(self) -> None:
        self._sink.flush()

    def identity(self) -> dict[str, Any]:
        return self._sink.identity()

    def close(self) -> None:
        self._sink.close()


class Spared(Sink):
    """A tracking service whose failure costs its own record and not the run, whose event log has all of it.

    Args:
        sink: Of a tracking service; after its first error it is closed and gets no more.
        tell: Takes a warning.
    """

    def __init__(self, sink: Sink, tell: Callable[[str], None]) -> None:
        self._sink, self._tell = sink, tell

    def write(self, event: EventName, values: Values) -> None:
        with self._sparing():
            self._sink.write(event, values)

    def flush(self) -> None:
        with self._sparing():
            self._sink.flush()

    def identity(self) -> dict[str, Any]:
        with self._sparing():
            return self._sink.identity()
        return {}

    def close(self) -> None:
        with self._sparing():
            self._sink.close()

    @contextmanager
    def _sparing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failed, self._sink = self._sink, NullSink()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._tell(f"the logger failed and gets no more of this run ({reason}); metrics.jsonl has all of it")
            with suppress(Exception):  # it has been told what is wrong
                failed.close()


class Reporter:
    """Hands every event to every sink. Without sinks it is silent: the reporter of all ranks but rank 0.

    Args:
        sinks: The receivers, in the order in which they take an event.

    Attributes:
        seconds: For which the training has waited for the sinks.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks, self._is_silent, self.seconds = Sinks(sinks), not sinks, 0.0

    def write(self, event: EventName, **values: Any) -> None:
        assert event in EVENTS, event
        if self._is_silent:
            return
        start = time.perf_counter()
        self._sinks.write(event, redact_event(values))
        if event not in BEFORE_THE_STEPS:
            self.seconds += time.perf_counter() - start

    def phase(self, message: str) -> None:
        """Shows at once what the run is busy with before its first step, for example ``reading data``."""
        self.write("phase", message=message)

    def flush(self) -> None:
        """Writes what any sink holds back."""
        self._sinks.flush()

    def identity(self) -> dict[str, Any]:
        """Returns what the tracking service needs to go on with this run."""
        return self._sinks.identity()

    def close(self) -> None:
        """Closes all sinks, also after one of them has failed; then raises that failure."""
        self._sinks.close()


def check_share(share: float | None) -> None:
    """Refuses a largest share of a run's time that is none.

    Raises:
        UserError: It is not above 0 and at most 1.
    """
    if share is not None and not 0 < share <= 1:
        raise UserError(
            f"logger.max_share={share} has to be above 0 and at most 1 (1 % of a run's time is 0.01); null sends every "
            "step, logger=none none"
        )


@dataclass(frozen=True, kw_only=True)
class LoggerSpec(ABC):
    """A user's settings of a tracking service."""

    @abstractmethod
    def open(
        self,
        run_dir: Path,
        config: dict[str, Any],
        group_default: str | None = None,
        resumed: dict[str, Any] | None = None,
    ) -> Sink:
        """Starts to track a run, or goes on.

        Args:
            run_dir: The run folder, for the files of the service.
            config: The whole configuration of the run as plain values.
            group_default: The group when the user names none, for example the sweep.
            resumed: The :meth:`Sink.identity` of the run that goes on.

        Raises:
            UserError: The service does not answer or refuses the login.
        """


@dataclass(frozen=True)
class ConsoleOptions:
    """How much standard output shows.

    Attributes:
        log_every_s: Seconds between two step lines where it is not a terminal.
        log_every_steps: Steps between two step lines there, in addition.
        verbose: Shows all there is to know about each event where it is one.
    """

    log_every_s: float = 10.0
    log_every_steps: int | None = None
    verbose: bool = False


def open_report(
    logger: LoggerSpec,
    run_dir: Path,
    config: dict[str, Any],
    sweep: str | None = None,
    console: ConsoleOptions = ConsoleOptions(),
    resumed: dict[str, Any] | None = None,
) -> Reporter:
    """Writes ``env.json`` and opens every sink of a run, on rank 0.

    Args:
        logger: The tracking service.
        run_dir: The run folder, which exists.
        config: The composed configuration, for the tracking service.
        sweep: Group of the runs of one sweep there.
        console: How much standard output shows.
        resumed: What the tracking service needs to go on with its run; ``None`` for a new run.
    """
    from pipetransformer.report.run_folder import ENVIRONMENT, EVENT_LOG, JsonLines, environment, write_json

    write_json(run_dir / ENVIRONMENT, environment())
    tracker = logger.open(run_dir, redact(config), sweep, resumed)
    log = JsonLines(run_dir / EVENT_LOG, goes_on=resumed is not None)
    view = open_console(console)
    shown = Sinks([log, view])
    return Reporter([log, view, Spared(tracker, lambda told: shown.write("warning", redact_event({"message": told})))])


def open_console(options: ConsoleOptions) -> Sink:
    """Returns the view of standard output: live on a terminal, lines anywhere else."""
    import rich.console

    from pipetransformer.report.plain import PlainLog
    from pipetransformer.report.terminal import Terminal

    console = rich.console.Console(emoji=False)
    if console.is_terminal:
        return Terminal(console, options.verbose)
    return PlainLog(options.log_every_s, options.log_every_steps)


def print_phase(message: str) -> None:
    """Prints a phase as the console would, in a process without a report: the launcher. Imports nothing."""
    if sys.stdout.isatty():
        show_phase(message, sys.stdout, shutil.get_terminal_size().columns)
    else:
        print(f"[{datetime.now():%H:%M:%S}] {message} ...", flush=True)


def print_line(message: str) -> None:
    """Prints a line that stays, in a process without a report."""
    if sys.stdout.isatty():
        erase_phase(sys.stdout)
    stamp = "" if sys.stdout.isatty() else f"[{datetime.now():%H:%M:%S}] "
    print(f"{stamp}{message}", flush=True)


def show_phase(message: str, terminal: IO[str], width: int) -> None:
    """Replaces the line that the cursor is on by a phase; the phases of all processes share one line."""
    words = f"{message} ..."
    terminal.write(f"{ERASE_LINE}{words[: width - 1]}")
    terminal.flush()


def erase_phase(terminal: IO[str]) -> None:
    """Erases the line of the last phase, before other words; the line is empty where none is shown."""
    terminal.write(ERASE_LINE)
    terminal.flush()

"""The way of a run's events: the trainer writes each event once, and every sink shows it in its own way."""

from __future__ import annotations

import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from pipetransformer.errors import UserError
from pipetransformer.report.secrets import redact, redact_event
from pipetransformer.report.sinks import BEFORE_THE_STEPS, EVENTS, EventName, Sink, Sinks, Spared, Unheard, unheard

ERASE_LINE = "\r\x1b[2K"  # for the line that a terminal's cursor is on


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
    from pipetransformer.report.environment import ENVIRONMENT, environment
    from pipetransformer.report.event_log import EVENT_LOG, JsonLines, write_json

    write_json(run_dir / ENVIRONMENT, environment())
    tracker = logger.open(run_dir, redact(config), sweep, resumed)
    log = JsonLines(run_dir / EVENT_LOG, goes_on=resumed is not None)
    view = Unheard(open_console(console))
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
    with unheard():
        if sys.stdout.isatty():
            show_phase(message, sys.stdout, shutil.get_terminal_size().columns)
        else:
            print(f"[{datetime.now():%H:%M:%S}] {message} ...", flush=True)


def print_line(message: str) -> None:
    """Prints a line that stays, in a process without a report."""
    stamp = "" if sys.stdout.isatty() else f"[{datetime.now():%H:%M:%S}] "
    with unheard():
        if sys.stdout.isatty():
            erase_phase(sys.stdout)
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

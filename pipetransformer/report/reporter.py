"""Where the events of a run go: the trainer writes each event once, every sink shows it in its own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Values = dict[str, Any]

EVENTS = ("start", "phase", "step", "decision", "transition", "cache_fill", "evaluate", "warning", "summary")


class Sink(ABC):
    """One place where events go. Lives on the main process of rank 0."""

    @abstractmethod
    def write(self, event: str, values: Values) -> None:
        """Takes one of :data:`EVENTS` with plain values that JSON can hold."""

    @abstractmethod
    def close(self) -> None:
        """Gives back files, terminals and connections; the run has ended, well or not."""


class NullSink(Sink):
    """Shows nothing."""

    def write(self, event: str, values: Values) -> None:
        pass

    def close(self) -> None:
        pass


class Reporter:
    """Hands every event to every sink; without sinks it is silent, which is what the other ranks use.

    Args:
        sinks: The receivers, in the order in which they are told.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = tuple(sinks)

    def write(self, event: str, **values: Any) -> None:
        assert event in EVENTS, event
        for sink in self._sinks:
            sink.write(event, values)

    def close(self) -> None:
        """Closes all sinks, also after one of them has failed; then raises that failure."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


@dataclass(frozen=True, kw_only=True)
class LoggerSpec(ABC):
    """What a user writes about a tracking service."""

    @abstractmethod
    def open(self, run_dir: Path, config: dict[str, Any], group_default: str | None = None) -> Sink:
        """Starts to track a run.

        Args:
            run_dir: The run folder, for the files of the service.
            config: The whole configuration of the run as plain values.
            group_default: The group when the user names none, for example the sweep.

        Raises:
            ValueError: The service does not answer or does not let us in.
        """

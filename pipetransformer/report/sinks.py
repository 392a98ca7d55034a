"""The places where a run's events go, and what stands between an event and its place."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal, TypeVar, get_args

Values = dict[str, Any]
EventName = Literal[
    "phase", "start", "resume", "step", "plan_timed", "decision", "transition", "cache_plan", "cache_fill", "evaluate",
    "checkpoint", "warning", "summary",
]  # fmt: skip
EVENTS: tuple[EventName, ...] = get_args(EventName)
BEFORE_THE_STEPS: tuple[EventName, ...] = ("phase", "start", "resume")
MAX_SHARE = 0.003  # of a run's time, for its tracking service
Shown = TypeVar("Shown")
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


@contextmanager
def unheard() -> Iterator[None]:
    """Goes on where standard output takes no more, as a pipe that has ended or a lost terminal, and lets it be lost."""
    try:
        yield
    except OSError:
        with suppress(OSError, ValueError):  # it is no file
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)


class Unheard(Sink):
    """A view of standard output that costs no run: the event log has all that it shows.

    Args:
        sink: Shows the events.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, event: EventName, values: Values) -> None:
        with unheard():
            self._sink.write(event, values)

    def flush(self) -> None:
        with unheard():
            self._sink.flush()

    def close(self) -> None:
        with unheard():
            self._sink.close()


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

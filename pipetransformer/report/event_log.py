"""The event log and the JSON files of a run, written and read with the same checks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipetransformer.errors import UserError
from pipetransformer.report.secrets import redact, redact_event
from pipetransformer.report.sinks import EVENTS, EventName, Sink, Values

EVENT_LOG, SUMMARY = "metrics.jsonl", "summary.json"
MAX_NUMBER = 2**63
HOLD_S = 0.1  # of steps that a kill takes from the log; a run that goes on takes them again


class JsonLines(Sink):
    """Writes one line per event to ``metrics.jsonl``: ``{"event": ..., "time": ISO 8601 in UTC, ...values}``.

    Steps that come within :data:`HOLD_S` of each other are written together, and before any other event. A line takes
    25 us after another one and 210 between two steps, which leave nothing of its code in the processor's caches.

    Args:
        path: The file. What an earlier run left there is replaced, as its summary is.
        goes_on: The run is resumed, and its events are added.
        clock: Seconds since any fixed moment.
    """

    def __init__(self, path: Path, goes_on: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        if not goes_on:
            path.unlink(missing_ok=True)
        self._file = path.open("a", encoding="utf-8")  # a run that is rolled back cuts the file meanwhile
        self._held: list[tuple[EventName, datetime, Values]] = []
        self._clock, self._written_s = clock, -math.inf

    def write(self, event: EventName, values: Values) -> None:
        self._held.append((event, datetime.now(UTC), values))
        if event != "step" or self._clock() - self._written_s >= HOLD_S:
            self.flush()

    def flush(self) -> None:
        held, self._held, self._written_s = self._held, [], self._clock()
        for event, at, values in held:
            known = {"event": event, "time": at.isoformat(timespec="milliseconds")}
            self._file.write(_line(known | redact_event(values)) + "\n")
        self._file.flush()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


def read_events(log: Path, name: EventName) -> list[Values]:
    """Reads the events of one name from an event log.

    Raises:
        UserError: The log is damaged.
    """
    return [line for line in read_lines(log) if line["event"] == name]


def read_lines(path: Path) -> Iterator[Values]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                values = _parse(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):  # the last one, of a run that goes on or was killed
                    return
                raise UserError(
                    f"{path} line {number} is incomplete ({first_line(error)}); remove this line to read the rest"
                ) from error
            if not isinstance(values, dict) or values.get("event") not in [*EVENTS]:
                shown = line.decode(errors="replace").strip()[:80]
                raise UserError(f"{path} line {number} is not an event of a run: {shown}")
            yield values


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` atomically: a reader sees the old file or the new one. NaN and infinities become null."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(_dumps(redact(value), indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_json(path: Path) -> Any:
    try:
        found = _parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: it holds no values by name")
    return found


def known_summary(run_dir: Path) -> Values:
    """Returns the summary of a run; empty where it has none, or a damaged one."""
    try:
        return read_json(run_dir / SUMMARY)
    except (OSError, ValueError):
        return {}


def _parse(text: bytes) -> Any:
    """Parses JSON as a run writes it: without NaN, infinities, and numbers that no counter or size reaches."""
    found = json.loads(text, parse_constant=_refuse_constant)
    _check_numbers(found)
    return found


def _refuse_constant(name: str) -> None:
    raise UserError(f"{name} is no number of JSON")


def _check_numbers(value: Any) -> None:
    if isinstance(value, int | float) and not abs(value) < MAX_NUMBER:
        raise UserError(f"the number {str(value)[:20]} is larger than any that a run writes")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _check_numbers(each)


def first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, indent=indent)


_encoder = json.JSONEncoder(allow_nan=False, ensure_ascii=False)  # json.dumps would make one for each step


def _line(values: Values) -> str:
    try:
        _check_numbers(values)
        return _encoder.encode(values)
    except ValueError:  # NaN, infinity or a number as large as a rate of 1e30, which few steps have
        return _dumps(values)


def _finite(value: Any) -> Any:
    """Replaces NaN and infinities by null, since JSON knows neither and many readers refuse them.

    So is a number that :func:`_check_numbers` would refuse, as the perplexity of a model that has diverged.
    """
    if isinstance(value, float) and not abs(value) < MAX_NUMBER:
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

"""The timeline of a step on every device, as a file for chrome://tracing or ui.perfetto.dev."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipetransformer.report.event_log import read_json

COMPUTE = ("forward", "backward", "optimizer")
COMMUNICATION = ("transfer", "all-reduce")
CATEGORIES = (*COMPUTE, *COMMUNICATION)


@dataclass(frozen=True)
class Event:
    """A span of time on one device; a simulation and a run write the same.

    Attributes:
        name: What is shown, for example ``F2`` for the forward pass of micro-batch 2.
        start_s: Since the start of the step.
        seconds: How long it took.
        rank: The device.
        category: One of :data:`CATEGORIES`; communication gets a row of its own, as it overlaps with computing.
    """

    name: str
    start_s: float
    seconds: float
    rank: int
    category: str

    def __post_init__(self) -> None:
        assert self.category in CATEGORIES, self
        assert self.seconds >= 0, self

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


def pass_name(is_forward: bool, microbatch: int, stage: int, stages_per_rank: int) -> str:
    """Returns the name of a pass: ``F2``, or ``F2 stage 1`` where devices run several stages."""
    name = f"{'F' if is_forward else 'B'}{microbatch}"
    return f"{name} stage {stage}" if stages_per_rank > 1 else name


def write_trace(events: Sequence[Event], folder: Path, number: int) -> Path:
    """Writes a step of the plan of that number in Chrome's trace format: a process per device, microseconds."""
    file = folder / f"trace_{number}.json"
    rows = [*_names(event.rank for event in events), *map(_row, events)]
    file.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}), encoding="utf-8")
    return file


def read_traces(folder: Path) -> dict[int, list[Event]]:
    """Reads the traces of a run, by the number of the plan, without what is no span of a step.

    Raises:
        UserError: A file is damaged.
    """
    return {_number(file): [*_events(read_json(file))] for file in trace_files(folder)}


def trace_files(folder: Path) -> list[Path]:
    """Returns the traces of a run in the order of their plans, of the time before it was resumed as well."""
    return sorted((file for file in folder.glob("trace_*.json") if _number(file) >= 0), key=_number)


def remove_traces(folder: Path, first: int = 0) -> None:
    """Removes the traces of plans from a number on: of an earlier run, or of steps that a run makes again otherwise."""
    for trace in trace_files(folder):
        if _number(trace) >= first:
            trace.unlink()


def _number(file: Path) -> int:
    """Returns the number of the plan; -1 for a file of another name."""
    number = file.stem.removeprefix("trace_")
    return int(number) if number.isdecimal() else -1


def _events(trace: dict[str, Any]) -> Iterator[Event]:
    for row in trace["traceEvents"]:
        if row["ph"] == "X" and row["cat"] in CATEGORIES:
            yield Event(row["name"], row["ts"] / 1e6, max(0.0, row["dur"] / 1e6), row["pid"], row["cat"])


def _row(event: Event) -> dict[str, object]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.category,
        "pid": event.rank,
        "tid": _track(event.category),
        "ts": event.start_s * 1e6,
        "dur": event.seconds * 1e6,
    }


def _track(category: str) -> int:
    return 0 if category in COMPUTE else 1


def _names(ranks: Iterable[int]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for rank in sorted(set(ranks)):
        rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"device {rank}"}})
        for track, name in enumerate(("compute", "communication")):
            rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}})
    return rows

"""What a run leaves behind: its events, settings, environment and summary as files that outlive every viewer."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from pipetransformer.errors import UserError
from pipetransformer.report.reporter import EVENTS, Sink, Values

CONFIG, ENVIRONMENT, EVENT_LOG, SUMMARY = "config.yaml", "env.json", "metrics.jsonl", "summary.json"

PACKAGES = ("pipetransformer", "torch", "torchvision", "timm", "transformers", "datasets", "numpy", "hydra-core")


class JsonLines(Sink):
    """Appends one line per event to ``metrics.jsonl``: ``{"event": ..., "time": ISO 8601 in UTC, ...values}``.

    A resumed run goes on in the same file; the half line that a killed run may have left is cut off first.

    Args:
        path: The file, made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            text = path.read_bytes()
            os.truncate(path, text.rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: str, values: Values) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.write(_dumps({"event": event, "time": time, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` in one go: a reader sees the old file or the new one. NaN and infinities become null."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(_dumps(value, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def environment() -> dict[str, Any]:
    """What the numbers of a run depend on besides its settings, for ``env.json``."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git_commit": _git_commit(),
        "command": [sys.executable, *sys.argv],
    }


@dataclass(frozen=True)
class Run:
    """A run folder in memory.

    Attributes:
        folder: Where it was read from.
        config: The settings of the run.
        summary: How the run ended; empty while it has not.
        events: For each of :data:`EVENTS` its values in order, each with ``time``. What a run did between its last
            checkpoint and its death is left out where it was done again after resuming.
    """

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    events: dict[str, list[Values]]

    @property
    def start(self) -> Values:
        return self.events["start"][-1]

    @property
    def plans(self) -> list[tuple[int, Values]]:
        """Each plan with the step from which it held."""
        begun = [(start["step"], start["plan"]) for start in self.events["start"]]
        changed = [(transition["step"], transition["after"]) for transition in self.events["transition"]]
        return sorted(begun + changed, key=lambda entry: entry[0])


def read_run(folder: str | Path) -> Run:
    """Reads a run folder, of a run that goes on as well.

    Raises:
        ValueError: The folder holds no run, or a file of it is damaged.
    """
    folder = Path(folder)
    missing = [name for name in (CONFIG, EVENT_LOG) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} is not a run folder: it has no {' and no '.join(missing)}; give the folder of one run"
        )
    lines = list(_read_lines(folder / EVENT_LOG))
    if not any(line["event"] == "start" for line in lines):
        raise UserError(f"{folder / EVENT_LOG} has no start event: the run ended before its first plan")
    events: dict[str, list[Values]] = {name: [] for name in EVENTS}
    for line in _without_repeats(lines):
        events[line["event"]].append({name: value for name, value in line.items() if name != "event"})
    config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    summary = _read_json(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    return Run(folder, config, summary, events)


def _read_lines(path: Path) -> Iterator[Values]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path} line {number} is incomplete ({error}); remove this line to read the rest"
                ) from error
            if not isinstance(values, dict) or values.get("event") not in EVENTS:
                raise UserError(f"{path} line {number} is not an event of a run: {line.strip()[:80]}")
            yield values


def _without_repeats(lines: list[Values]) -> list[Values]:
    """Keeps the last account of every step. Each start event gets the ``step`` after which its account begins."""
    starts = [index for index, line in enumerate(lines) if line["event"] == "start"]
    kept = lines[: starts[0]]
    for begin, end in pairwise([*starts, len(lines)]):
        account = lines[begin:end]
        so_far = max((line.get("step", 0) for line in kept), default=0)
        before = next((line["step"] - 1 for line in account if line["event"] == "step"), so_far)
        redone = {_moment(line) for line in account if "step" in line}
        kept = [line for line in kept if line.get("step", 0) <= before and _moment(line) not in redone]
        kept += [{**account[0], "step": before}, *account[1:]]
    return kept


def _moment(line: Values) -> tuple[Any, ...]:
    return line["event"], line.get("step"), line.get("split")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, indent=indent)


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity, and many of its readers refuse them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

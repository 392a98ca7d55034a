"""The run folder: events, settings, environment and summary as files that outlive every viewer."""

from __future__ import annotations

import glob
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from pipetransformer.errors import UserError
from pipetransformer.report.secrets import redact, redact_event
from pipetransformer.report.sinks import EVENTS, EventName, Sink, Values

CONFIG, ENVIRONMENT, EVENT_LOG, SUMMARY = "config.yaml", "env.json", "metrics.jsonl", "summary.json"
OVERRIDES = "overrides.json"
MODEL, WANDB, TENSORBOARD = "model", "wandb", "tensorboard"
PACKAGE = "pipetransformer"
DRY_RUN = "dry_run"  # status of a run that was only estimated
MAX_NUMBER = 2**63
HOLD_S = 0.1  # of steps that a kill takes from the log; a run that goes on takes them again
NO_ARM = ("seed", "hydra", "logger", "resume", "overwrite", "verbose", "log_every_s", "log_every_steps", "trace")
"""Options and sections of which runs that are compared as alike may have different values."""


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


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` atomically: a reader sees the old file or the new one. NaN and infinities become null."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(_dumps(redact(value), indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def environment() -> dict[str, Any]:
    """Returns what the numbers of a run depend on besides its settings, for ``env.json``."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "packages": library_versions(),
        "git_commit": _git_commit(),
        "command": [sys.executable, *sys.argv],
    }


def share_files(folder: Path) -> None:
    """Gives every file of a folder the folder's own permissions: some writers keep theirs from all but the owner."""
    mode = folder.stat().st_mode & 0o666  # nobody executes them
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(mode)


def next_steps(folder: Path, summary: Values) -> list[tuple[str, str]]:
    """Returns what to do with a run that has ended, by what lies in its folder: a label and a command each.

    Args:
        summary: Of the run; without a model of its own, that in the folder would be an earlier run's.
    """
    here, model = short_path(folder), summary.get("model")
    rows = [("model", _load_command(Path(model["folder"])))] if model else []
    rows = [row for row in rows if row[1]]
    if offline := sorted((folder / WANDB).glob("offline-run-*")):
        parts = (shlex.quote(str(short_path(part))) for part in offline)  # one for each start of a resumed run
        rows.append(("W&B", f"wandb sync {' '.join(parts)}"))
    if (folder / TENSORBOARD).is_dir():
        rows.append(("TensorBoard", f"tensorboard --logdir {shlex.quote(str(here / TENSORBOARD))}"))
    return [*rows, ("figures", f"python -m pipetransformer.report {shlex.quote(str(here))}")] if rows else rows


def saved_model(folder: Path) -> tuple[Path, int | None]:
    """Returns the folder of the model that a run has saved, and the step of its weights.

    The step is ``None`` where the run has not ended or saved none; an earlier run may have left the folder then.
    """
    summary = read_json(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    model = summary.get("model") or {}
    elsewhere = Path(model.get("folder", folder / MODEL))  # the run folder may have been full, or copied or moved since
    is_outside = elsewhere.name != MODEL and elsewhere.is_dir()
    return elsewhere if is_outside else folder / MODEL, model.get("step")


def _load_command(model: Path) -> str:
    """Returns the folder of a saved model and how its library loads it; empty where there is none."""
    if not (model / "config.json").is_file():
        return ""
    config, path = read_json(model / "config.json"), short_path(model)
    if "architectures" in config:
        return f"{path}  (transformers.{config['architectures'][0]}.from_pretrained('{path}'))"
    if "architecture" in config:
        return f"{path}  (timm.create_model('local-dir:{path}', pretrained=True))"
    return str(path)  # of a library that is not known here


def short_path(path: Path) -> Path:
    """Returns the path from the working directory, where it lies below."""
    path, here = path.resolve(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


@dataclass(frozen=True)
class Run:
    """A run folder in memory.

    Attributes:
        folder: Where it was read from.
        config: The settings of the run.
        summary: How the run ended; empty while it has not.
        events: For each of :data:`EVENTS` its values in order, each with ``time``.
    """

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    events: dict[str, list[Values]]

    @property
    def has_started(self) -> bool:
        """Returns whether the run has come to its first plan."""
        return bool(self.events["start"])

    @property
    def start(self) -> Values:
        return self.events["start"][0]

    @property
    def num_steps(self) -> int:
        """Returns the steps of the whole run: it may be resumed for more epochs."""
        return (self.events["resume"] or [self.start])[-1]["num_steps"]

    @property
    def plans(self) -> list[tuple[int, Values]]:
        """Returns each plan with the step from which it held, and in it the devices of the run then, ``world_size``."""
        changed = [(each["step"], each["time"], each["after"]) for each in self.events["transition"]]
        changed += [(each["step"], each["time"], each["plan"]) for each in self.events["resume"]]
        plans = [(0, self.start["time"], self.start["plan"]), *sorted(changed, key=lambda change: change[:2])]
        return [(step, plan | {"world_size": self.world_size(time)}) for step, time, plan in plans]

    def world_size(self, time: str) -> int:
        """Returns the devices of the run at the time of an event: it may be resumed with other ones."""
        starts = [event for event in (self.start, *self.events["resume"]) if event["time"] <= time]
        return (starts or [self.start])[-1]["world_size"]


def find_run(name: str | Path) -> Path:
    """Returns the folder that a user means by a relative path, also in a notebook, whose kernel starts elsewhere.

    The working directory comes first, then the one of the shell, then the folders above (a repository's root).
    """
    return next((place / name for place in _places() if (place / name / EVENT_LOG).is_file()), Path(name))


def find_pattern(runs: str) -> str:
    """Returns folders and globs, separated by commas, from the place where a user means them; see :func:`find_run`."""
    return ",".join(
        next((str(place / each) for place in _places() if matches(str(place / each))), each) for each in patterns(runs)
    )


def patterns(runs: str) -> list[str]:
    """Returns folders and globs that are separated by commas; a folder that is there may have commas in its name."""
    return [runs] if runs and Path(runs).is_dir() else [*filter(None, runs.split(","))]


def matches(pattern: str) -> list[Path]:
    """Returns the folder of that name, whatever its characters, else what a glob finds."""
    return [Path(pattern)] if Path(pattern).is_dir() else [Path(name) for name in glob.glob(pattern)]


def _places() -> list[Path]:
    here = Path.cwd()
    return [here, Path(os.environ.get("PWD", here)), *here.parents]


def read_run(folder: str | Path, may_have_failed: bool = False) -> Run:
    """Reads a run folder, of a run that goes on as well.

    Args:
        may_have_failed: Reads one that has ended before its first plan too; only its summary says something then.

    Raises:
        UserError: The folder holds no run, or a file of it is damaged.
    """
    folder = Path(folder)
    has_ended = may_have_failed and (folder / SUMMARY).is_file()
    missing = [name for name in (CONFIG, EVENT_LOG) if not (folder / name).is_file()]
    if missing and not (has_ended and missing == [EVENT_LOG]):
        raise UserError(
            f"{folder} is not a run folder: it has no {' and no '.join(missing)}; give the folder of one run"
        )
    events: dict[str, list[Values]] = {name: [] for name in EVENTS}
    for line in [] if missing else _read_lines(folder / EVENT_LOG):
        events[line["event"]].append({name: value for name, value in line.items() if name != "event"})
    if not events["start"] and not has_ended:
        log, resumed = folder / EVENT_LOG, events["resume"]
        lost = f"its lines before the run went on at step {resumed[0]['step']:,} are gone" if resumed else ""
        raise UserError(f"{log} has no start event: {lost or 'the run ended before its first plan'}")
    summary = read_json(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    return Run(folder, _read_config(folder / CONFIG), summary, events)


def read_events(log: Path, name: EventName) -> list[Values]:
    """Reads the events of one name from an event log.

    Raises:
        UserError: The log is damaged.
    """
    return [line for line in _read_lines(log) if line["event"] == name]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {_first_line(error)}") from error  # yaml lets some errors of Python pass
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged: it holds no settings")
    return config


def _read_lines(path: Path) -> Iterator[Values]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                values = _parse(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{path} line {number} is incomplete ({_first_line(error)}); remove this line to read the rest"
                ) from error
            if not isinstance(values, dict) or values.get("event") not in [*EVENTS]:
                shown = line.decode(errors="replace").strip()[:80]
                raise UserError(f"{path} line {number} is not an event of a run: {shown}")
            yield values


def read_json(path: Path) -> Any:
    try:
        found = _parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {_first_line(error)}") from error
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


def _first_line(error: Exception) -> str:
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


def write_overrides(folder: Path, overrides: Sequence[str]) -> None:
    """Writes the arguments of the command line, which a resumed run is composed of."""
    write_json(folder / OVERRIDES, {"overrides": list(overrides)})


def read_overrides(folder: Path) -> list[str] | None:
    """Returns the arguments of the command line that started a run; ``None`` for one that Python started."""
    path = folder / OVERRIDES
    if not path.is_file():
        return None
    overrides = read_json(path).get("overrides")
    if not (isinstance(overrides, list) and all(isinstance(one, str) for one in overrides)):
        raise UserError(f"{path} is damaged: it is no list of arguments")
    return overrides


def by_option(overrides: Iterable[str]) -> dict[str, str]:
    """Returns the arguments of a command by their options; of those for one option the last, which counts."""
    return {option_of(each): each for each in overrides}


def option_of(override: str) -> str:
    """Returns the option, or the group, of an argument as Hydra writes them, such as ``+experiment=tiny``."""
    return override.partition("=")[0].lstrip("+~")


def makes_arm(override: str) -> bool:
    """Returns False for an option that changes neither what a run learns nor how fast, and for the seed."""
    return option_of(override).partition(".")[0] not in NO_ARM


@cache  # 50 files of metadata are read, and every checkpoint asks
def library_versions() -> dict[str, str]:
    """Returns the versions of this package and of what it requires and is installed, by their own metadata."""
    try:
        required = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:  # a checkout that was not installed
        return {}
    names = [PACKAGE, *(re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line)]
    found = {name: _version(name) for name in names}
    return {name: version for name, version in found.items() if version is not None}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a run that does without it, such as one without a logger, goes on
        return None


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

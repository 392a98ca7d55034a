"""The run folder: settings, events and summary as files that outlive every viewer."""

from __future__ import annotations

import glob
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipetransformer.errors import UserError
from pipetransformer.report.event_log import EVENT_LOG, SUMMARY, first_line, read_json, read_lines
from pipetransformer.report.sinks import EVENTS, Values

CONFIG = "config.yaml"
MODEL, WANDB, TENSORBOARD = "model", "wandb", "tensorboard"
DRY_RUN = "dry_run"  # status of a run that was only estimated


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
        told = sorted([*self.events["resume"], *self.events["transition"]], key=lambda event: event["time"])
        known = (event["world_size"] for event in told if event["time"] <= time and "world_size" in event)
        return [self.start["world_size"], *known][-1]


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
    for line in [] if missing else read_lines(folder / EVENT_LOG):
        events[line["event"]].append({name: value for name, value in line.items() if name != "event"})
    if not events["start"] and not has_ended:
        log, resumed = folder / EVENT_LOG, events["resume"]
        lost = f"its lines before the run went on at step {resumed[0]['step']:,} are gone" if resumed else ""
        raise UserError(f"{log} has no start event: {lost or 'the run ended before its first plan'}")
    summary = read_json(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    return Run(folder, _read_config(folder / CONFIG), summary, events)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {first_line(error)}") from error  # yaml lets some errors of Python pass
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged: it holds no settings")
    return config


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


def saved_model(folder: Path) -> tuple[Path, int | None]:
    """Returns the folder of the model that a run has saved, and the step of its weights.

    The step is ``None`` where the run has not ended or saved none; an earlier run may have left the folder then.
    """
    summary = read_json(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    model = summary.get("model") or {}
    elsewhere = Path(model.get("folder", folder / MODEL))  # the run folder may have been full, or copied or moved since
    is_outside = elsewhere.name != MODEL and elsewhere.is_dir()
    return elsewhere if is_outside else folder / MODEL, model.get("step")


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


def _load_command(model: Path) -> str:
    """Returns the folder of a saved model and how its library loads it; empty where there is none."""
    path = short_path(model)
    if (model / "adapter_config.json").is_file():
        return f"{path}  (peft.PeftModel.from_pretrained(<model>, '{path}'))"
    if not (model / "config.json").is_file():
        return ""
    config = read_json(model / "config.json")
    if "architectures" in config:
        return f"{path}  (transformers.{config['architectures'][0]}.from_pretrained('{path}'))"
    if "architecture" in config:
        return f"{path}  (timm.create_model('local-dir:{path}', pretrained=True))"
    return str(path)  # of a library that is not known here


def short_path(path: Path) -> Path:
    """Returns the path from the working directory, where it lies below."""
    path, here = path.resolve(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def share_files(folder: Path) -> None:
    """Gives every file of a folder the folder's own permissions: some writers keep theirs from all but the owner."""
    mode = folder.stat().st_mode & 0o666  # nobody executes them
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(mode)

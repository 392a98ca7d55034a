"""Several runs side by side: what differs between them, what came out, and how far runs that differ by seed spread."""

from __future__ import annotations

import csv
import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pipetransformer.errors import UserError
from pipetransformer.report.format import duration, number, two_digits
from pipetransformer.report.run_folder import EVENT_LOG, Run, read_overrides, read_run
from pipetransformer.report.text import flatten

CONFIDENCE = 0.95
COLUMNS = (
    "arm", "runs", "result", "training time", "CPU of rank 0", "speed-up, predicted", "limit reached", "frozen",
    "cache hits", "status",
)  # fmt: skip
FIGURES = (
    "train_seconds", "cpu_seconds", "speedup_vs_static", "limit", "share_of_limit", "mean_frozen_fraction",
    "samples_per_second", "optimizer_steps", "last_step",
)  # fmt: skip
"""Figures of a run's summary in the CSV file."""


@dataclass(frozen=True)
class Arm:
    """Runs that differ by their seed alone.

    Attributes:
        name: The options by which it differs from other arms.
    """

    name: str
    runs: tuple[Run, ...]

    def figures(self, *names: str) -> list[float]:
        """Returns a figure of each run's summary, by its keys; of no run that has not written it."""
        found = (_figure(run.summary, names) for run in self.runs)
        return [value for value in found if value is not None]

    def row(self) -> tuple[str, ...]:
        """Returns a cell for each of :data:`COLUMNS`; several runs by their mean."""
        metrics = dict.fromkeys(run.summary["metric"]["name"] for run in self.runs if run.summary.get("metric"))
        result = with_interval(self.figures("metric", "value"))
        return (
            self.name,
            str(len(self.runs)),
            f"{', '.join(metrics)} {result}" if metrics else "-",
            _mean(self.figures("train_seconds"), duration),
            _mean(self.figures("cpu_seconds"), duration),
            _mean(self.figures("speedup_vs_static"), two_digits),
            _mean(self.figures("share_of_limit"), _percent),
            _mean(self.figures("mean_frozen_fraction"), _percent),
            _mean(self.figures("cache", "hit_rate"), _percent),
            ", ".join(dict.fromkeys(run.summary.get("status", "goes on") for run in self.runs)),
        )


def _figure(summary: Mapping[str, Any], names: Sequence[str]) -> float | None:
    value: Any = summary
    for name in names:
        value = (value or {}).get(name)
    return value


def _mean(values: Sequence[float], shown: Any) -> str:
    return shown(mean(values)) if values else "-"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def with_interval(values: Sequence[float]) -> str:
    """Returns the mean, and for several values the half width of its confidence interval: ``0.861 ± 0.004``."""
    if not values:
        return "-"
    half = half_width(values)
    return number(mean(values)) if half is None else f"{number(mean(values))} ± {two_digits(half)}"


def half_width(values: Sequence[float]) -> float | None:
    """Returns half the width of the mean's interval by Student's t at :data:`CONFIDENCE`; ``None`` for one value."""
    if len(values) < 2:
        return None
    from scipy.stats import t  # takes its time

    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))


def find_runs(runs: str) -> list[Path]:
    """Returns the run folders in folders and globs, separated by commas, each once, sorted.

    Raises:
        UserError: One of them holds no run.
    """
    found: dict[Path, None] = {}
    for pattern in filter(None, runs.split(",")):
        folders = [Path(name) for name in glob.glob(pattern)]
        own = sorted((log.parent for folder in folders for log in folder.rglob(EVENT_LOG)), key=_by_numbers)
        if not own:
            raise UserError(f"runs={pattern} holds no run: no folder there has {EVENT_LOG}; give folders or a glob")
        found |= dict.fromkeys(own)
    return list(found)


def _by_numbers(folder: Path) -> list[tuple[int, str]]:
    """Sorts job 10 behind job 9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in folder.parts]


def read_arms(folders: Iterable[Path]) -> tuple[list[Arm], list[str]]:
    """Reads runs, and groups those that differ by their seed alone, in the order of the first of each.

    Returns:
        The arms; for each folder that cannot be read, why.

    Raises:
        UserError: None can be read.
    """
    runs, problems = list[Run](), list[str]()
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except UserError as error:
            problems.append(str(error))
    if not runs:
        raise UserError("; ".join(problems) or "there are no runs to compare")
    groups: dict[str, list[Run]] = {}
    for run, name in zip(runs, _names(runs), strict=True):
        groups.setdefault(name, []).append(run)
    return [Arm(name, tuple(group)) for name, group in groups.items()], problems


def _names(runs: Sequence[Run]) -> list[str]:
    """Returns for each run the options in which not all runs are alike, without the seed."""
    given = [read_overrides(run.folder) for run in runs]
    settings = [_settings(run) if None in given else set(one or ()) for run, one in zip(runs, given, strict=True)]
    common = set.intersection(*settings)
    return [" ".join(sorted(filter(_is_shown, own - common))) or "all alike" for own in settings]


def _is_shown(option: str) -> bool:
    """Returns True for an option that makes another arm."""
    return not option.lstrip("+").startswith(("seed=", "hydra."))


def _settings(run: Run) -> set[str]:
    return {f"{name.replace('/', '.')}={value}" for name, value in flatten(run.config)}


def write_csv(arms: Sequence[Arm], file: Path) -> None:
    """Writes a row for each run with its figures as they are."""
    with file.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow(["arm", "seed", "folder", "status", "metric", "value", *FIGURES])
        for arm in arms:
            for run in arm.runs:
                metric = run.summary.get("metric") or {}
                own = [arm.name, run.config.get("seed"), run.folder, run.summary.get("status")]
                figures = [run.summary.get(name) for name in FIGURES]
                writer.writerow([*own, metric.get("name"), metric.get("value"), *figures])

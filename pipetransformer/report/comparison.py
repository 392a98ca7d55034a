"""Several runs side by side: what differs between them, what came out, and how far runs that differ by seed spread."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pipetransformer.errors import UserError
from pipetransformer.report.arm_names import arm_names
from pipetransformer.report.charts import without_idle_gains
from pipetransformer.report.environment import read_overrides
from pipetransformer.report.event_log import EVENT_LOG, SUMMARY
from pipetransformer.report.format import duration, number, two_digits
from pipetransformer.report.run_folder import CONFIG, Run, matches, patterns, read_run, short_path
from pipetransformer.report.summary_text import compares_a_part

CONFIDENCE = 0.95
MAX_NAMES = 4  # of the folders of an arm
COLUMNS = (
    "arm", "runs", "result", "best", "training time", "CPU of rank 0", "speed-up", "limit reached", "frozen",
    "cache hits", "status",
)  # fmt: skip
FIGURES = (
    "train_seconds", "cpu_seconds", "speedup_vs_static", "limit", "share_of_limit", "mean_frozen_fraction",
    "samples_per_second", "optimizer_steps", "last_step", "speedup_is", "compared_steps", "is_static",
)  # fmt: skip
CSV_NAMES = ("arm", "seed", "folder", "status", "metric", "value")  # first columns, by which a table is known
CACHE_FIGURES = ("hit_rate", "fill_seconds", "read_seconds", "wait_seconds")
"""Figures of a run's summary in the CSV file, as they are and with ``cache_`` before them."""


@dataclass(frozen=True)
class Arm:
    """Runs that differ by their seed alone.

    Attributes:
        name: The options by which it differs from other arms.
        runs: All of them, those that failed before their first plan included.
    """

    name: str
    runs: tuple[Run, ...]

    @property
    def started(self) -> list[Run]:
        """Returns the runs that have come to their first plan, which figures show."""
        return [run for run in self.runs if run.has_started]

    @property
    def counted(self) -> list[Run]:
        """Returns the runs whose figures count: those that completed, or where none did, those that took a step."""
        completed = [run for run in self.runs if run.summary.get("status") == "completed"]
        return completed or [run for run in self.runs if run.summary.get("optimizer_steps")]

    def figures(self, *names: str) -> list[float]:
        """Returns a figure of each counted run's summary, by its keys; of no run that has not written it."""
        return _figures(self.counted, names)

    @property
    def compared(self) -> list[Run]:
        """Returns the counted runs whose gains count: neither the best static plan itself, nor measured on a part."""
        others = (run for run in self.counted if not run.summary.get("is_static"))
        return [run for run in others if not compares_a_part(run.summary)]

    def by_seed(self, *names: str) -> list[float]:
        """Returns a figure for each seed; repeats of one, which are not independent, by their mean."""
        return [mean(values) for runs in repeats(self.counted) if (values := _figures(runs, names))]

    def _result(self, *names: str) -> str:
        """Returns the mean of a figure over the seeds with its interval, and how many runs lack it, as of a NaN."""
        text, num_runs = with_interval(self.by_seed(*names)), len(self.counted)
        num_found = len(self.figures(*names))
        return f"{text} ({num_found} of {num_runs} runs)" if 0 < num_found < num_runs else text

    def gains(self, name: str) -> list[float]:
        """Returns a figure that compares with the best static plan, of each run that does."""
        return _figures(self.compared, [name])

    def stored_bytes(self) -> list[float]:
        """Returns the bytes of each counted run's cache, of all tiers."""
        caches = [run.summary.get("cache") or {} for run in self.counted]
        return [sum(cache["bytes_by_tier"].values()) for cache in caches if cache.get("bytes_by_tier")]

    def row(self) -> tuple[str, ...]:
        """Returns a cell for each of :data:`COLUMNS`; several runs by their mean."""
        metrics = dict.fromkeys(run.summary["metric"]["name"] for run in self.counted if run.summary.get("metric"))
        result = self._result("metric", "value")
        return (
            self.name,
            f"{len(self.runs)} ({_folder_names(self.runs)})",
            f"{', '.join(metrics)} {result}" if metrics else "-",
            self._result("best", "value"),
            _mean(self.figures("train_seconds"), duration),
            _mean(self.figures("cpu_seconds"), duration),
            self._speedup(),
            _mean(self.gains("share_of_limit"), _percent),
            _mean(self.figures("mean_frozen_fraction"), _percent),
            _mean(self.figures("cache", "hit_rate"), _percent),
            _status(self.runs),
        )

    def _speedup(self) -> str:
        """Returns the mean speed-up, and where the time of the best static plan comes from."""
        gains = self.gains("speedup_vs_static")
        if not gains:
            if any(compares_a_part(run.summary) for run in self.counted):
                return "of a part alone"
            return "best static plan" if self.figures("speedup_vs_static") else "-"
        known = [run.summary for run in self.compared if run.summary.get("speedup_vs_static") is not None]
        is_measured = all(summary.get("speedup_is") == "measured" for summary in known)
        return f"{two_digits(mean(gains))} {'measured' if is_measured else 'predicted'}"


def repeats(runs: Iterable[Run]) -> list[list[Run]]:
    """Returns the runs of each seed."""
    of_seeds: dict[Any, list[Run]] = {}
    for run in runs:
        of_seeds.setdefault(run.config.get("seed"), []).append(run)
    return list(of_seeds.values())


def _folder_names(runs: Sequence[Run]) -> str:
    names = [run.folder.resolve().name for run in runs]
    return ", ".join(names if len(names) <= MAX_NAMES else [*names[: MAX_NAMES - 1], "..."])


def _status(runs: Sequence[Run]) -> str:
    """Returns ``completed``, or with the numbers of runs where they ended differently."""
    counts = Counter(map(_ending, runs))
    return ", ".join(status if len(counts) == 1 else f"{count} {status}" for status, count in counts.items())


def _ending(run: Run) -> str:
    status = run.summary.get("status", "goes on")
    return "completed without a model" if status == "completed" and run.summary.get("error") else status


def errors(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """Returns the folder of each run that ended with an error, and the error's first line."""
    runs = [run for arm in arms for run in arm.runs if run.summary.get("error")]
    return [(str(short_path(run.folder)), str(run.summary["error"]).strip().partition("\n")[0]) for run in runs]


def _figures(runs: Iterable[Run], names: Sequence[str]) -> list[float]:
    found = (_figure(run.summary, names) for run in runs)
    return [value for value in found if value is not None]


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
    from scipy.special import stdtrit  # takes its time

    return float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / sqrt(len(values))


def share_interval(share: float, num_samples: int) -> tuple[float, float]:
    """Returns the ends of Wilson's interval at :data:`CONFIDENCE` for a share of independent samples."""
    if num_samples < 1:
        return share, share
    from scipy.special import ndtri  # takes its time

    z = float(ndtri((1 + CONFIDENCE) / 2))
    middle, weight = share + z * z / (2 * num_samples), 1 + z * z / num_samples
    half = z * sqrt(share * (1 - share) / num_samples + (z / (2 * num_samples)) ** 2)
    low, high = (middle - half) / weight, (middle + half) / weight
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding leaves 0 to 1, and the share, at its ends


def find_runs(runs: str) -> list[Path]:
    """Returns the run folders in folders and globs, separated by commas, each once, sorted.

    Raises:
        UserError: One of them holds no run.
    """
    found: dict[Path, None] = {}
    for pattern in patterns(runs):
        files = (file for folder in matches(pattern) for name in (EVENT_LOG, SUMMARY) for file in folder.rglob(name))
        own = sorted({file.parent for file in files if (file.parent / CONFIG).is_file()}, key=_by_numbers)
        if not own:
            missing = f"no folder there has {CONFIG} and {EVENT_LOG} or {SUMMARY}"
            raise UserError(f"runs={pattern} holds no run: {missing}; give folders or a glob")
        found |= dict.fromkeys(own)
    return list(found)


def _by_numbers(folder: Path) -> list[tuple[int, str]]:
    """Sorts job 10 behind job 9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in folder.parts]


def read_arms(folders: Iterable[Path], check: Callable[[Run], None] = lambda _: None) -> tuple[list[Arm], list[str]]:
    """Reads runs, and groups those that differ by their seed alone, in the order of the first of each.

    Args:
        check: Raises UserError for a run that has to be left out.

    Returns:
        The arms; for each folder that cannot be read or is left out, why.

    Raises:
        UserError: None can be read.
    """
    runs, given, problems = list[Run](), list[list[str] | None](), list[str]()
    for folder in folders:
        try:
            run, overrides = read_run(folder, may_have_failed=True), read_overrides(folder)
            check(run)
        except UserError as error:
            problems.append(str(error))
        else:
            runs.append(run)
            given.append(overrides)
    if not runs:
        raise UserError("; ".join(problems) or "there are no runs to compare")
    groups: dict[str, list[Run]] = {}
    for run, name in zip(runs, arm_names(runs, given), strict=True):
        groups.setdefault(name, []).append(run)
    return [Arm(name, tuple(group)) for name, group in groups.items()], problems


def check_csv(file: Path) -> None:
    """Keeps a file of the user's where :func:`write_csv` is to write one.

    Raises:
        UserError: The file is there and is no table of this package.
    """
    keep_file(file, ",".join(CSV_NAMES), "table")


def keep_file(file: Path, beginning: str, what: str) -> None:
    """Refuses to replace a file that does not begin as one of this package does.

    Args:
        what: It would be, for the message.

    Raises:
        UserError: It is there and begins otherwise.
    """
    if not file.is_file():
        return
    with file.open("rb") as content:
        is_ours = content.read(len(beginning.encode())) == beginning.encode()
    if not is_ours:
        raise UserError(
            f"{file} is there, and is no {what} of this command; move it away, or name another place by out="
        )


def write_csv(arms: Sequence[Arm], file: Path) -> None:
    """Writes a row for each run with its figures as they are."""
    with file.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        names = [*FIGURES, *(f"cache_{name}" for name in CACHE_FIGURES)]
        writer.writerow([*CSV_NAMES, *names, "error"])
        for arm in arms:
            for run in arm.runs:
                metric = run.summary.get("metric") or {}
                own = [arm.name, run.config.get("seed"), run.folder, run.summary.get("status")]
                cache = run.summary.get("cache") or {}
                summary = without_idle_gains(run.summary)  # as the table has it
                figures = [*(summary.get(name) for name in FIGURES), *(cache.get(name) for name in CACHE_FIGURES)]
                writer.writerow([*own, metric.get("name"), metric.get("value"), *figures, run.summary.get("error")])

"""Whole runs of ``train.py`` for a table of arms, the arms in turns within each seed.

An experiment is a tuple of :class:`Arm`, a tuple of columns, and :func:`main`. A run that is complete in the folder is
not repeated, so that the same command goes on where it was stopped. Ratios are taken within a seed, so that a slow hour
falls on both runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any

from experiments.measured import Took, run_measured
from experiments.record import markdown, publish, share
from pipetransformer.report.comparison import with_interval
from pipetransformer.report.event_log import SUMMARY
from pipetransformer.report.run_folder import Run, read_run
from pipetransformer.report.summary_text import time_spent

TOOK = "took.json"
ALWAYS = ("overwrite=true", "logger=none")
FIRST_PLAN, FIRST_STEP = "first plan", "first step"
NOT_IN_PATHS = r"[^A-Za-z0-9.]+"  # Hydra would read them as its own


@dataclass(frozen=True)
class Outcome:
    """A run that is complete.

    Attributes:
        options: That make the arm.
        run: Its folder.
        took: Of its command, all processes counted; ``None`` where nobody measured it.
    """

    arm: str
    seed: int
    options: tuple[str, ...]
    run: Run
    took: Took | None = None

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.run.summary

    @property
    def metric(self) -> float:
        return self.summary["metric"]["value"]

    @property
    def prefixes(self) -> list[tuple[int, int]]:
        """Steps from which another number of blocks is frozen, with that number."""
        found: list[tuple[int, int]] = []
        for plan in self.summary["plans"]:
            if plan["num_frozen"] != (found[-1][1] if found else 0):
                found.append((plan["step"], plan["num_frozen"]))
        return found

    @property
    def signal_share(self) -> float:
        """Time of measuring signals over that of all steps."""
        return sum(self.summary.get("signals", {}).values()) / self.summary["step_seconds"]

    @property
    def seconds(self) -> float:
        """Wall time of the command."""
        assert self.took is not None, "the command was not measured"
        return self.took.seconds

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the command's processes."""
        assert self.took is not None, "the command was not measured"
        return self.took.cpu_seconds

    @property
    def peak_bytes(self) -> int:
        """The most that a process of the command had in memory."""
        assert self.took is not None, "the command was not measured"
        return self.took.peak_bytes

    @property
    def start_s(self) -> dict[str, float]:
        """Seconds from the command to what the run tells of its start, in order; empty where nobody noted its start."""
        began = self.took.began if self.took is not None else 0.0
        told = [(phase["message"], phase) for phase in self.run.events["phase"]]
        told += [
            (FIRST_PLAN, self.run.events["start"][0]),
            *((FIRST_STEP, step) for step in self.run.events["step"][:1]),
        ]
        times = ((name, datetime.fromisoformat(event["time"]).timestamp()) for name, event in told if "time" in event)
        return {name: seconds - began for name, seconds in times} if began else {}

    def as_dict(self) -> dict[str, Any]:
        """Returns what ``results.json`` keeps of it."""
        names = (
            "train_seconds",
            "optimizer_steps",
            "mean_frozen_fraction",
            "speedup_vs_static",
            "limit",
            "share_of_limit",
            "time_parts",
            "report_seconds",
        )
        figures = {name: self.summary.get(name) for name in names}
        measured = ("seconds", "cpu_seconds", "peak_bytes") if self.took is not None else ()
        took = {name: getattr(self, name) for name in measured}
        known = {"arm": self.arm, "seed": self.seed, "options": list(self.options), "metric": self.metric}
        more = {"prefixes": self.prefixes, "signals": self.summary.get("signals", {}), "start_s": self.start_s}
        return known | figures | took | more | {"cache": self.summary.get("cache")}


SoFar = Mapping[str, Outcome]
"""The outcomes of a seed's arms that have run, by name."""


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        options: Of ``train.py``; or how they follow from the arms before it, with the same seed.
    """

    name: str
    options: tuple[str, ...] | Callable[[SoFar], tuple[str, ...]] = ()


def as_long_as(arm: str, baseline: str) -> Callable[[SoFar], tuple[str, ...]]:
    """Returns the options of the control: no freezing, in the whole epochs that another arm's CPU time pays for."""

    def options(so_far: SoFar) -> tuple[str, ...]:
        whole = so_far[baseline]
        share = so_far[arm].cpu_seconds / whole.cpu_seconds
        return ("freeze=none", f"epochs={max(1, int(share * whole.run.config['epochs']))}")

    return options


def is_complete(run_dir: Path) -> bool:
    """Returns whether a run has come to its end here."""
    summary = run_dir / SUMMARY
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "completed"


def train(arm: Arm, seed: int, folder: Path, options: Sequence[str], so_far: SoFar) -> Outcome:
    """Runs one arm as a user would, unless it is complete, and returns what came out."""
    own = arm.options if isinstance(arm.options, tuple) else arm.options(so_far)
    run_dir = folder / f"{re.sub(NOT_IN_PATHS, '_', arm.name)}-{seed}"
    if not (is_complete(run_dir) and (run_dir / TOOK).is_file()):
        command = [sys.executable, "train.py", *ALWAYS, *options, *own, f"seed={seed}", f"hydra.run.dir={run_dir}"]
        run_measured(command, run_dir / TOOK, os.environ | {"OMP_NUM_THREADS": "1"})
    return Outcome(arm.name, seed, own, read_run(run_dir), Took.read(run_dir / TOOK))


def run_arms(arms: Sequence[Arm], seeds: Sequence[int], folder: Path, options: Sequence[str]) -> list[Outcome]:
    """Runs all arms of a seed one after the other, then those of the next."""
    outcomes = list[Outcome]()
    for seed in seeds:
        so_far: dict[str, Outcome] = {}
        for arm in arms:
            so_far[arm.name] = train(arm, seed, folder, options, so_far)
            metric, took = so_far[arm.name].metric, so_far[arm.name].took
            print(f"seed {seed}, {arm.name}: {metric:.4f}, {took}", flush=True)
        outcomes += so_far.values()
    return outcomes


@dataclass(frozen=True)
class Row:
    """The outcomes of an arm, by seed, beside those of the arm that it is compared with."""

    own: Mapping[int, Outcome]
    baseline: Mapping[int, Outcome]

    @cached_property
    def first(self) -> Outcome:
        return next(iter(self.own.values()))

    def values(self, figure: Callable[[Outcome], float]) -> list[float]:
        return [figure(outcome) for outcome in self.own.values()]

    def each(self, cell: Callable[[Outcome], str]) -> str:
        """Returns the cell of each seed, once where they are alike."""
        return " / ".join(dict.fromkeys(cell(outcome) for outcome in self.own.values()))

    def ratio(self, figure: Callable[[Outcome], float]) -> float:
        """Returns the median over the seeds of the baseline's figure over the arm's own."""
        return median(figure(self.baseline[seed]) / figure(outcome) for seed, outcome in self.own.items())


Column = tuple[str, Callable[[Row], str]]
"""A column's header, and its cell of an arm."""


def _frozen_from(row: Row) -> str:
    return row.each(lambda one: ", ".join(f"{frozen} from {step:,}" for step, frozen in one.prefixes) or "none")


def _sum_of_parts(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up the parts of the time of all seeds; empty where one of them has none."""
    parts = [one["time_parts"] for one in summaries if one.get("time_parts")]
    if len(parts) < len(summaries):
        return {}
    added = {name: sum(each.get(name, 0.0) for each in parts) for name in {name for each in parts for name in each}}
    return {"time_parts": added, "train_seconds": sum(one["train_seconds"] for one in summaries)}


ARM: Column = ("arm", lambda row: row.first.arm)
FROZEN_FROM: Column = ("frozen blocks from step", _frozen_from)
FROZEN: Column = ("mean frozen", lambda row: f"{mean(row.values(lambda one: one.summary['mean_frozen_fraction'])):.0%}")
ACCURACY: Column = ("main metric", lambda row: with_interval(row.values(lambda one: one.metric)))
TRAINING: Column = ("training", lambda row: f"{median(row.values(lambda one: one.summary['train_seconds'])):.0f} s")
SECONDS: Column = ("command", lambda row: f"{median(row.values(lambda one: one.seconds)):.0f} s")
CPU: Column = ("CPU", lambda row: f"{median(row.values(lambda one: one.cpu_seconds)):.0f} s")
MEMORY: Column = ("peak memory", lambda row: f"{median(row.values(lambda one: one.peak_bytes)) / 2**20:,.0f} MiB")
SIGNALS: Column = ("signals", lambda row: f"{median(row.values(lambda one: one.signal_share)):.2%}")
FASTER: Column = ("times as fast", lambda row: f"{row.ratio(lambda one: one.seconds):.2f}")
FASTER_CPU: Column = ("in CPU time", lambda row: f"{row.ratio(lambda one: one.cpu_seconds):.2f}")
SHARE: Column = ("share of the limit", lambda row: share(one.summary.get("share_of_limit") for one in row.own.values()))
SPENT: Column = (
    "where the time went",
    lambda row: time_spent(_sum_of_parts([one.summary for one in row.own.values()])),
)
USUAL = (ARM, FROZEN, ACCURACY, TRAINING, SECONDS, CPU, FASTER, FASTER_CPU, SHARE)


def table(outcomes: Sequence[Outcome], columns: Sequence[Column], baseline: str | None = None) -> str:
    """Returns the arms as a table, in the order in which they ran.

    Args:
        baseline: The arm with which the others are compared; ``None``: the first one.
    """
    arms: dict[str, dict[int, Outcome]] = {}
    for outcome in outcomes:
        arms.setdefault(outcome.arm, {})[outcome.seed] = outcome
    compared = arms[baseline or next(iter(arms))]
    rows = (Row(own, compared) for own in arms.values())
    return markdown([name for name, _ in columns], ([cell(row) for _, cell in columns] for row in rows))


def main(
    arms: Sequence[Arm], into: Path, columns: Sequence[Column] = USUAL, seeds: Sequence[int] = (1, 2, 3),
    arguments: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """The command of an experiment: trains all arms, shows the table and keeps it.

    Args:
        into: Folder of the experiment, whose README.md and results.json take the results.
        seeds: By default.
    """
    parser = argparse.ArgumentParser(description="Trains arms in turns. A run that is complete is not repeated.")
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("options", nargs="*", help="of train.py: model, data, epochs, processes")
    parser.add_argument("--seeds", type=numbers, default=tuple(seeds), help="as 1,2,3")
    parser.add_argument("--into", type=Path, default=into, help="folder whose README.md and results.json are written")
    given = parser.parse_intermixed_args(arguments)
    outcomes = run_arms(arms, given.seeds, given.folder.absolute(), given.options)
    publish(table(outcomes, columns), [outcome.as_dict() for outcome in outcomes], given.into)


def numbers(text: str) -> tuple[int, ...]:
    """Returns the seeds that a command is given as ``1,2,3``."""
    return tuple(map(int, text.split(",")))

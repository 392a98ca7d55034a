"""The ablation as a table: ``python -m experiments.components.table <sweep folder>``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from experiments.arms import FROZEN, Column, Outcome, Row, table
from experiments.record import publish
from pipetransformer.report.run_folder import CONFIG, read_run

GROUP = "experiment=components/"
BASELINE = "baseline"
KEEPING = "hydra.output_subdir=.hydra"  # each job's overrides
ARMS = {  # in the order of the table, as the paper names them
    BASELINE: "no freezing",
    "freeze": "freeze only",
    "autopipe": "+ AutoPipe",
    "autopipe_autocache": "+ AutoPipe + AutoCache",
    "autopipe_autodp": "+ AutoPipe + AutoDP",
    "all": "all",
    "shorter": "control: no freezing, fewer epochs",
}
PAPER = {BASELINE: 1.00, "freeze": 0.95, "autopipe_autocache": 1.26, "autopipe_autodp": 2.27, "all": 2.83}
"""Throughput relative to no freezing, ViT-B/16 on ImageNet: the paper's ablation."""


def _accuracy(row: Row) -> str:
    values = row.values(lambda run: run.metric)
    return f"{mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def _median(name: str, form: str) -> Column:
    """Returns a column with the median of a figure of the summary."""
    header = {"train_seconds": "training, s", "speedup_vs_static": "speed-up over best static plan"}.get(name, name)
    return header.replace("_", " "), lambda row: format(median(row.values(lambda run: run.summary[name])), form)


COLUMNS: tuple[Column, ...] = (
    ("arm", lambda row: ARMS[row.first.arm]),
    ("accuracy, mean (min-max)", _accuracy),
    _median("train_seconds", ".1f"),
    ("times as fast as no freezing", lambda row: f"{row.ratio(lambda run: run.summary['train_seconds']):.2f}"),
    ("in the paper", lambda row: f"{PAPER[row.first.arm]:.2f}" if row.first.arm in PAPER else ""),
    _median("speedup_vs_static", ".2f"),
    _median("limit", ".2f"),
    _median("share_of_limit", ".0%"),
    FROZEN,
)


def read_sweep(folder: Path) -> list[Outcome]:
    """Returns all runs of a sweep, in the order of the arms.

    Raises:
        ValueError: The folder holds no job of this experiment, a job has not completed, or an arm has no baseline.
    """
    runs = [_read_job(config.parent) for config in sorted(folder.glob(f"*/{CONFIG}"))]
    if not runs:
        raise ValueError(f"{folder} holds no run; give the hydra.sweep.dir of the sweep")
    alone = {run.seed for run in runs} - {run.seed for run in runs if run.arm == BASELINE}
    if alone:
        raise ValueError(f"{folder} has no {GROUP}{BASELINE} with seed {sorted(alone)} to compare with; run it as well")
    order = list(ARMS)
    return sorted(runs, key=lambda run: order.index(run.arm))


def _read_job(folder: Path) -> Outcome:
    run, arm = read_run(folder), _arm(folder)
    if run.summary.get("status") != "completed":
        raise ValueError(f"{folder} ({arm}) is {run.summary.get('status', 'unfinished')}; run it again")
    return Outcome(arm, run.config["seed"], (f"{GROUP}{arm}",), run)


def _arm(folder: Path) -> str:
    file = folder / ".hydra" / "overrides.yaml"
    if not file.is_file():
        raise ValueError(f"{folder} has no {file.name}, so nothing names its arm; run the sweep with {KEEPING}")
    overrides = yaml.safe_load(file.read_text(encoding="utf-8"))
    arms = [text.removeprefix(GROUP) for text in overrides if text.startswith(GROUP)]
    if not arms or arms[0] not in ARMS:
        raise ValueError(f"{folder} is no arm of this experiment: {GROUP}... is not among its overrides {overrides}")
    return arms[0]


def _plan(plan: dict[str, int | list[list[int]]]) -> str:
    """Returns frozen and cached blocks, stages, replicas and micro-batches, for example ``2f 2c 2x2 m4``."""
    stages = plan["stages"]
    assert isinstance(stages, list)
    grid = f"{len(stages)}x{plan['num_replicas']} m{plan['num_microbatches']}"
    return f"{plan['num_frozen']}f {plan['cache_level']}c {grid}"


def plans(outcome: Outcome) -> tuple[str, ...]:
    """Returns the plans of a run in short."""
    return tuple(_plan(plan) for _, plan in outcome.run.plans)


def figures(outcome: Outcome) -> dict[str, Any]:
    """Returns what ``results.json`` keeps of a run."""
    names = ("train_seconds", "speedup_vs_static", "limit", "share_of_limit", "mean_frozen_fraction")
    known = {"arm": outcome.arm, "seed": outcome.seed, "accuracy": outcome.metric}
    return known | {name: outcome.summary[name] for name in names} | {"plans": plans(outcome)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", type=Path, help="the hydra.sweep.dir of the sweep")
    parser.add_argument("--into", type=Path, help="folder whose results.json and README.md take the results")
    options = parser.parse_args(arguments)
    try:
        runs = read_sweep(options.sweep)
        publish(table(runs, COLUMNS, BASELINE), [figures(run) for run in runs], options.into)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

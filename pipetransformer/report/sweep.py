"""The jobs of a sweep in one table, read from their run folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import rich.console
from rich.table import Table
from rich.text import Text

from pipetransformer.report.format import duration, number, two_digits
from pipetransformer.report.run_folder import SUMMARY, read_json, read_overrides, short_path

WIDTH_OF_A_LOG = 200


def print_sweep(folder: Path) -> None:
    """Prints a row for each job of a sweep that wrote a summary; nothing where none did.

    Args:
        folder: The sweep's folder, with one run folder per job, named by its number.
    """
    jobs = sorted((path.parent for path in folder.glob(f"*/{SUMMARY}")), key=_number)
    if not jobs:
        return
    console = _console()
    console.print(sweep_table(jobs), highlight=False)
    console.print(Text(f"folders: {folder}/<job>"), soft_wrap=True)
    console.print(Text(f"side by side, with figures: pipetransformer-report runs={short_path(folder)}"), soft_wrap=True)


def _console() -> rich.console.Console:
    console = rich.console.Console(emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_LOG
    return console


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table, which wraps its first column alone."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column != columns[0])
    for row in rows:
        table.add_row(*map(Text, row))
    _console().print(table, highlight=False)


def sweep_table(jobs: Sequence[Path]) -> Table:
    """Returns a row per run folder: what differs between the jobs, and what came out."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="jobs of the sweep", title_justify="left")
    overrides = [read_overrides(job) or [] for job in jobs]
    summaries = [read_json(job / SUMMARY) for job in jobs]
    for column in ("job", "options", "result", "best", "training time", "speed-up", "frozen", "status"):
        table.add_column(column, no_wrap=column != "options")
    for job, own, summary in zip(jobs, overrides, summaries, strict=True):
        differing = " ".join(each for each in own if not all(each in other for other in overrides))
        table.add_row(job.name, Text(differing), *_results(summary), Text(summary["status"]))
    return table


def _results(summary: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells from the result to the mean frozen fraction; ``-`` where there is none."""
    metric, best = summary.get("metric"), summary.get("best")
    result = f"{metric['name']} {number(metric['value'])}" if metric else "-"
    speedup, frozen = summary.get("speedup_vs_static"), summary.get("mean_frozen_fraction")
    return (
        result,
        number(best["value"]) if best else "-",
        duration(summary.get("train_seconds")),
        "-" if speedup is None or summary.get("is_static") else two_digits(speedup),
        "-" if frozen is None else f"{frozen:.0%}",
    )


def _number(folder: Path) -> tuple[int, str]:
    return int(folder.name) if folder.name.isdigit() else 0, folder.name

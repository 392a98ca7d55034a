"""The table at the end of a sweep, the same that compares runs afterwards; and tables on the console."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import rich.console
from rich.table import Table
from rich.text import Text

from pipetransformer.errors import UserError
from pipetransformer.report.comparison import COLUMNS, Arm, errors, find_runs, read_arms
from pipetransformer.report.event_log import SUMMARY
from pipetransformer.report.format import plural
from pipetransformer.report.run_folder import short_path

WIDTH_OF_A_LOG = 200
SPACE, MIN_WRAPPED = 2, 24  # characters between columns, and of the column that is wrapped


def print_sweep(folder: Path) -> None:
    """Prints the comparison of a sweep's jobs that have a summary, and the command for its page; else nothing.

    Args:
        folder: The sweep's folder, with one run folder per job, named by its number.
    """
    if not any(folder.glob(f"*/{SUMMARY}")):
        return
    try:
        arms, problems = read_arms(find_runs(str(folder)))
    except UserError as error:  # the sweep has ended all the same
        arms, problems = [], [str(error)]
    console = _console()
    num_jobs = sum(len(arm.runs) for arm in arms)
    console.print(Text(f"jobs of the sweep: {plural(num_jobs, 'run')} in {plural(len(arms), 'arm')}"), soft_wrap=True)
    print_arms(arms)
    for problem in problems:
        console.print(Text(f"left out: {problem}"), soft_wrap=True)
    console.print(Text(f"folders: {folder}/<job>"), soft_wrap=True)
    command = shlex.join(["pipetransformer-report", f"runs={short_path(folder)}"])
    console.print(Text(f"as a page with figures: {command}"), soft_wrap=True)


def print_arms(arms: Sequence[Arm]) -> None:
    """Prints a row for each arm, and below the table how its runs failed."""
    print_table(COLUMNS, [arm.row() for arm in arms])
    for folder, error in errors(arms):
        _console().print(Text(f"failed: {folder}: {error}"), soft_wrap=True)


def _console() -> rich.console.Console:
    console = rich.console.Console(emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_LOG
    return console


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table, which wraps its first column alone; on a console that is too narrow, a line for each cell."""
    rows, console = [*rows], _console()
    first, *others = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if sum(others) + SPACE * len(others) + min(first, MIN_WRAPPED) > console.width:
        for row in rows:
            console.print(Text(f"{columns[0]}: {row[0]}"), soft_wrap=True)
            for column, cell in zip(columns[1:], row[1:], strict=True):
                console.print(Text(f"  {column}: {cell}"), soft_wrap=True)
        return
    table = Table(box=None, padding=(0, SPACE, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column != columns[0], overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, highlight=False)

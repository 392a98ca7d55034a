"""Rows of plain values as CSV or as lines of JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pipetransformer.errors import UserError

Row = dict[str, Any]


def row_writer(file: Path) -> Callable[[Iterable[Row]], int]:
    """Returns what writes rows to a new file, and their number, so that a wrong name is refused before the work.

    Values by name in a row become columns ``scores_<name>`` of a CSV file, which all rows have alike, and lists
    cells of JSON.

    Raises:
        UserError: The file is there already, its folder is not, or it has another ending.
    """
    write = {".csv": _write_csv, ".jsonl": _write_lines}.get(file.suffix.lower())
    if write is None:
        raise UserError(f"output={file} has to end in .csv or .jsonl")
    if file.exists():
        raise UserError(f"output={file} is there already; give another file, or remove it")
    if not file.resolve().parent.is_dir():
        raise UserError(f"output={file} has to be in a folder that is there")
    return lambda rows: _whole(file, rows, write)


def _whole(file: Path, rows: Iterable[Row], write: Callable[[Path, Iterator[Row]], None]) -> int:
    """Writes all rows, or leaves no file."""
    unfinished, num_rows = file.with_name(file.name + ".tmp"), 0

    def counted() -> Iterator[Row]:
        nonlocal num_rows
        for row in rows:
            num_rows += 1
            yield row

    try:
        write(unfinished, counted())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return num_rows


def _write_lines(file: Path, rows: Iterator[Row]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_csv(file: Path, rows: Iterator[Row]) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = None
        for row in map(_flat, rows):
            writer = writer or _with_header(csv.DictWriter(lines, [*row]))
            writer.writerow(row)


def _with_header(writer: csv.DictWriter[str]) -> csv.DictWriter[str]:
    writer.writeheader()
    return writer


def _flat(row: Row) -> Row:
    flat: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name}_{key}": each for key, each in value.items()}
        else:
            flat[name] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    return flat

"""Tab-separated tables with a header row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

Table = dict[str, Sequence[object]]


def read_tsv(file: Path) -> Table:
    """Reads the columns by name. Quotes are ordinary characters.

    Raises:
        ValueError: The file is not UTF-8 text, or a row is longer or shorter than the header.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            header, *rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    except ValueError as error:
        raise ValueError(f"{file} is not a tab-separated table in UTF-8 with a header row ({error})") from error
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"{file} line {number} has {len(row)} columns, the header has {len(header)}: {header}")
    return {name: [row[column] for row in rows] for column, name in enumerate(header)}

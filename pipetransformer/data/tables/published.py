"""Published tables of texts with labels, from tab-separated files or the hub: their columns as classes or values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipetransformer.data.tables.base import refuse_twins
from pipetransformer.errors import UserError

LABEL_COLUMNS = ("label", "gold_label", "is_duplicate", "score")  # the hub's name first, then the published files'
NO_LABEL = ("-1", "")


@dataclass(frozen=True)
class Table:
    """Columns of equal length.

    Attributes:
        name: The file or the hub's split, for messages.
        columns: The cells of each column by its name, in the order of the rows.
        first_line: Line of the first row in its file; ``None`` for rows of the hub, which are numbered from 0.
    """

    name: str
    columns: Mapping[str, Sequence[object]]
    first_line: int | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def at(self, row: int) -> str:
        """Names the place of a row for a message."""
        return f"row {row} of {self.name}" if self.first_line is None else f"{self.name} line {self.first_line + row}"

    @property
    def label_column(self) -> str | None:
        """The first column with a usual name for labels; ``None`` where there is none."""
        return next((column for column in LABEL_COLUMNS if column in self.columns), None)

    @property
    def has_labels(self) -> bool:
        """True where at least one row has a label: published test files mark theirs as unknown."""
        column = self.label_column
        return column is not None and any(str(label) not in NO_LABEL for label in self.columns[column])


def read_tsv(file: Path) -> Table:
    """Reads a tab-separated table with a header row. Quotes are ordinary characters; blank lines may end the file.

    Raises:
        UserError: The file is not UTF-8 text, or a row is longer or shorter than the header.
    """
    try:
        with file.open(encoding="utf-8-sig") as lines:
            header, *rows = (line.removesuffix("\n").split("\t") for line in lines)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not a tab-separated table in UTF-8 with a header row ({error})") from error
    while rows and not "".join(rows[-1]).strip() and len(rows[-1]) < len(header):
        rows.pop()
    refuse_twins(file, header)
    table = Table(str(file), {name: [] for name in header}, first_line=2)
    for row, cells in enumerate(rows):
        if len(cells) != len(header):
            raise UserError(f"{table.at(row)} has {len(cells)} columns, the header has {len(header)}: {header}")
    return Table(table.name, {name: [row[i] for row in rows] for i, name in enumerate(header)}, table.first_line)


def text_columns(table: Table, alternatives: Sequence[tuple[str, ...]]) -> tuple[list[str], ...]:
    """Returns the texts of the first alternative whose columns the table has.

    Raises:
        UserError: None of them is there, or a cell has no text.
    """
    names = next((names for names in alternatives if {*names} <= {*table.columns}), None)
    if names is None:
        wanted = " or ".join(" and ".join(names) for names in dict.fromkeys(alternatives))
        raise UserError(f"{table.name} has the columns {', '.join(table.columns)}; the task needs {wanted}")
    for name in names:
        absent = next((row for row, cell in enumerate(table.columns[name]) if cell is None), None)
        if absent is not None:
            raise UserError(f"{table.at(absent)} has no {name}; write a text there or remove the row")
    return tuple([str(cell) for cell in table.columns[name]] for name in names)


def class_labels(table: Table, classes: Sequence[str]) -> np.ndarray:
    """Returns the class of each row, (N,) of int64; a label is a number or the name of a class.

    Raises:
        UserError: There is no column of labels, or some are neither.
    """
    labels = _labels(table)
    known = {text: number for number, name in enumerate(classes) for text in (str(number), name)}
    wrong = [row for row, label in enumerate(labels) if label not in known]
    if wrong:
        raise UserError(
            f"{table.at(wrong[0])} has the label {labels[wrong[0]]!r}, and {len(wrong)} labels of {len(labels)} are "
            f"wrong; give 0 to {len(classes) - 1} or {', '.join(classes)}"
        )
    return np.array([known[label] for label in labels], dtype=np.int64)


def number_labels(table: Table, highest: float) -> np.ndarray:
    """Returns the value of each row, (N,) of float64 from 0 to ``highest``.

    Raises:
        UserError: There is no column of labels, or some are no numbers in this range.
    """
    labels = _labels(table)
    values = np.array([_number(label) for label in labels], dtype=np.float64)
    wrong = np.flatnonzero(~((values >= 0) & (values <= highest)))  # not-a-number is wrong too
    if len(wrong):
        raise UserError(
            f"{table.at(int(wrong[0]))} has the label {labels[wrong[0]]!r}, and {len(wrong)} labels of {len(labels)} "
            f"are wrong; give numbers from 0 to {highest}, or evaluate on a split with labels by dataset.eval_split="
        )
    return values


def _labels(table: Table) -> list[str]:
    column = table.label_column
    if column is None:
        names = ", ".join(table.columns)
        raise UserError(f"{table.name} has the columns {names}; name the one with the labels 'label'")
    return [str(label) for label in table.columns[column]]


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return np.nan

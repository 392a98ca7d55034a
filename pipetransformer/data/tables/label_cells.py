"""Cells of a column of labels, whatever their type in the file: which differ, which are missing, and their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.data.tables.rows import Rows

pc: Any = pyarrow.compute  # its functions are made on import, where no type checker sees them
WHOLE = re.compile(r"[+-]?\d+")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)
NO_LABEL = -1  # of rows of the hub that are not labelled


def column_of(rows: Rows, column: str) -> pa.Array:
    """Returns a whole column in one piece."""
    combined = rows.column(column).combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def distinct(cells: pa.Array) -> tuple[list[Any], np.ndarray]:
    """Returns the different cells, and for each cell which of them it is, (N,)."""
    encoded = pc.dictionary_encode(cells, null_encoding="encode")
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy(zero_copy_only=False)


def present(rows: Rows, column: str) -> pa.Array:
    """Returns a column in which each row has a label.

    Raises:
        UserError: A cell is null, not a number, blank, or the -1 of a class that is not known.
    """
    cells = column_of(rows, column)
    absent = pc.is_null(cells, nan_is_null=True)
    if is_text(cells.type):
        absent = pc.or_kleene(absent, pc.equal(pc.utf8_trim_whitespace(cells), ""))
    if class_names(rows.features[column]):
        absent = pc.or_kleene(absent, pc.equal(cells, NO_LABEL))
    refuse_missing(rows, column, absent)
    return cells


def refuse_missing(rows: Rows, column: str, absent: pa.Array, remedy: str = "write a label there") -> None:
    """Raises UserError with the first row that has no label, and the number of them.

    Args:
        absent: For each row whether it has none.
        remedy: What to do, beside removing the row.
    """
    count = pc.sum(absent).as_py() or 0
    if count:
        others = f", and {count} rows have none" if count > 1 else ""
        raise UserError(f"{rows.at(first(absent))} has no {column}{others}; {remedy} or remove the row")


def without_labels(rows: Rows, columns: Sequence[str], train: Rows) -> str:
    """Returns why no row of a split has a label, as a predicate; empty where one has, or training has none either.

    Args:
        rows: The split.
        columns: Columns of the labels.
        train: The training split: where it has a label -1, that is one in other splits, too.
    """
    known = _labels_in(train, columns) if {*columns} <= {*train.features} else set[str]()
    if not known:
        return ""
    if absent := [column for column in columns if column not in rows.features]:
        others = [column for column in rows.features if column not in train.features]
        return "" if get_close_matches(absent[0], others, n=1, cutoff=0.5) else f"has no column {absent[0]}"
    found = _labels_in(rows, columns)
    if found - ({str(NO_LABEL)} - known):
        return ""
    what = f"nothing but {NO_LABEL}" if found else "nothing"
    return f"has {what} in {', '.join(columns)}"


def _labels_in(rows: Rows, columns: Sequence[str]) -> set[str]:
    """Returns the names of the labels in columns of any type."""
    found = set[str]()
    for column in columns:
        cells = column_of(rows, column)
        cells = pc.list_flatten(cells) if holds_lists(cells.type) else cells
        if is_plain(cells.type):
            found |= {name(cell) for cell in distinct(cells)[0] if cell is not None and cell == cell}
        elif cells.null_count < len(cells):
            found.add(str(cells.type))
    return found - {""}


def flat_lists(rows: Rows, column: str, separator: str | None) -> tuple[pa.Array, np.ndarray]:
    """Returns the labels of all rows one after the other, and the row of each; an empty text has none.

    Args:
        separator: Stands between two labels of a cell that is text.

    Raises:
        UserError: A cell, or a label in a list, is null.
    """
    cells = column_of(rows, column)
    refuse_missing(rows, column, pc.is_null(cells), "write an empty list there")
    lists = cells if holds_lists(cells.type) else separated(cells, separator)
    flat, parents = pc.list_flatten(lists), pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
    if flat.null_count:
        row = int(parents[first(pc.is_null(flat))])
        raise UserError(f"{rows.at(row)} has a null among its {column}; write a class there or remove it")
    if lists is not cells:  # nothing may stand between two separators
        is_label = pc.not_equal(flat, "")
        flat, parents = flat.filter(is_label), parents[is_label.to_numpy(zero_copy_only=False)]
    return flat, parents


def separated(cells: pa.Array, separator: str | None) -> pa.Array:
    """Returns texts as lists of what stands between the separators, without spaces around it."""
    assert separator is not None
    lists = pc.split_pattern(cells, separator)
    return type(lists).from_arrays(lists.offsets, pc.utf8_trim_whitespace(lists.values))


def first(flags: pa.Array) -> int:
    """Returns the index of the first that is true."""
    return pc.index(flags, True).as_py()


def class_names(feature: Any) -> tuple[str, ...]:
    """Returns the names that the ``datasets`` library has for the numbers of a column, or of its lists."""
    inner = getattr(feature, "feature", feature)
    return tuple(getattr(inner, "names", None) or ())


def named(cells: Sequence[Any], feature: Any) -> list[str]:
    """Returns labels as names of classes."""
    names = class_names(feature)
    return [names[cell] if names and 0 <= cell < len(names) else name(cell) for cell in cells]


def name(cell: Any) -> str:
    """Returns a label as a name: without spaces around it, true or false, and whole numbers without a point."""
    if isinstance(cell, bool):
        return str(cell).lower()
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()


def number(cell: Any) -> float:
    """Returns a label as a number; not a number where it is none."""
    return float(cell) if not isinstance(cell, str) or NUMBER.fullmatch(cell.strip()) else np.nan


def holds_lists(kind: pa.DataType) -> bool:
    """Returns whether each cell is a list."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_multi_hot(cells: pa.Array) -> bool:
    """Returns whether cells are lists with a number for each class, and not of the classes that a row has.

    Those are of a floating type, as in transformers, or truth values, or whole numbers that are all 0 or 1 in lists of
    one length, 2 or more.
    """
    kind = cells.type
    if not holds_lists(kind) or not pa.types.is_integer(kind.value_type):
        return holds_lists(kind) and (pa.types.is_floating(kind.value_type) or pa.types.is_boolean(kind.value_type))
    lengths, values = pc.unique(pc.list_value_length(cells)).to_pylist(), pc.list_flatten(cells)
    are_even = len(lengths) == 1 and (lengths[0] or 0) > 1
    return are_even and pc.all(pc.is_in(values, pa.array([0, 1], values.type))).as_py()


def is_text(kind: pa.DataType) -> bool:
    """Returns whether cells are texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_fraction(kind: pa.DataType) -> bool:
    """Returns whether cells are numbers that need not be whole."""
    return pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def is_plain(kind: pa.DataType) -> bool:
    """Returns whether a cell is one text, number or truth value."""
    return is_text(kind) or is_fraction(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def short(value: Any) -> str:
    """Returns a value for a message."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

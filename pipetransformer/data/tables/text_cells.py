"""Columns of texts, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from pipetransformer.data.tables.label_cells import NUMBER, first, is_text, pc
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.data.tables.rows import Rows


def text_batches(rows: Rows, columns: tuple[str, ...], refuse_numbers: bool = True) -> Iterator[tuple[list[str], ...]]:
    """Yields the texts of each column, batch by batch, and looks at them on the way.

    Args:
        rows: The table.
        columns: Names of the columns.
        refuse_numbers: Refuse a column of nothing but numbers, which was hardly meant; ``False`` where the columns are
            known.

    Raises:
        UserError: There is no such column, a row has no text in it, or all that it holds are numbers.
    """
    for column in columns:
        rows.require("dataset.text", column)
        kind = rows.features.arrow_schema.field(column).type
        if not is_text(kind):
            raise UserError(
                f"dataset.text={column}: {rows.name} has cells of type {kind} there; name a column of texts"
            )
    only_numbers = {*columns} if refuse_numbers else set[str]()
    for start, table in rows.batches(columns):
        texts = tuple(_texts(rows, start, column, table[column]) for column in columns)
        only_numbers -= {name for name, batch in zip(columns, texts, strict=True) if not _are_numbers(batch)}
        yield texts
    for column in only_numbers:
        raise UserError(f"dataset.text={column}: {rows.name} has nothing but numbers there; name a column of texts")


def _texts(rows: Rows, start: int, column: str, cells: pa.ChunkedArray) -> list[str]:
    """Returns the texts of one batch, whose first row is ``start``."""
    absent = pc.or_kleene(pc.is_null(cells), pc.equal(pc.utf8_trim_whitespace(cells), ""))
    if pc.any(absent).as_py():
        raise UserError(f"{rows.at(start + first(absent))} has no {column}; write a text there or remove the row")
    return cells.to_pylist()


def _are_numbers(texts: list[str]) -> bool:
    return all(NUMBER.fullmatch(text.strip()) for text in texts)

"""The base of a file of tables: rows in batches, the line of each for messages, and what all formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipetransformer.errors import UserError

ROWS_PER_BATCH = 1000
BLOCK_BYTES = 1 << 20  # of lines that are read at a time
BYTE_ORDER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
Record = tuple[int, dict[str, Any]]  # the line that a row begins in, and its cells by column


@dataclass(frozen=True)
class TableFile(ABC):
    """One file of rows.

    Attributes:
        path: The file.
        delimiter: Character between the cells of a delimited file; ``None``: by the file's ending.
    """

    path: Path
    delimiter: str | None = None

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Returns names and types of the columns.

        Raises:
            UserError: The file cannot be read, or a column has values of several kinds.
        """

    @abstractmethod
    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yields all rows in order as columns of these types.

        Raises:
            UserError: A row cannot be read; the message names its line.
        """

    @abstractmethod
    def at(self, row: int) -> str:
        """Names the place of a row, numbered from 0, for a message; it may read the file."""


class RecordFile(TableFile):
    """A file that is read from its beginning, row by row."""

    @property
    def unit(self) -> str:
        """The unit in which the rows are numbered."""
        return "line"

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yields each row with the line that it begins in.

        Raises:
            UserError: A row cannot be read; the message names its line.
        """

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for records in batched(self.records()):
            yield self._as_batch([row for _, row in records], schema)

    def _as_batch(self, rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([self._column(rows, each) for each in schema], schema=schema)

    def _column(self, rows: list[dict[str, Any]], field: pa.Field) -> pa.Array:
        try:
            return pa.array([row.get(field.name) for row in rows], field.type)
        except pa.ArrowException as error:  # as a whole number above 2^53 where other rows have fractions
            raise UserError(f"{self.path}: {field.name} has no type for all its values ({first_line(error)})") from None

    def at(self, row: int) -> str:
        return f"{self.path} {self.unit} {_nth(self.records(), row)[0]}"


def text_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file with their ends, without a byte-order mark.

    The file is open while a block is read and not between two lines: an error elsewhere may leave this generator in its
    trace, for as long as that lives.

    Raises:
        UserError: A line is not UTF-8, or has a NUL byte.
    """
    number = 1
    try:
        for number, line in enumerate(chain.from_iterable(_blocks_of_lines(path)), 1):
            if number == 1 and (encoding := BYTE_ORDER_MARKS.get(line[:2])):
                raise UserError(f"{path} is {encoding}, not UTF-8; convert it: iconv -f {encoding} -t UTF-8")
            if b"\0" in line:
                raise UserError(f"{path} line {number} has a NUL byte: it is no text, or it is damaged")
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} line {number} is not UTF-8 (byte 0x{error.object[error.start]:02x}); if it is Latin-1, convert "
            "it: iconv -f LATIN1 -t UTF-8"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def _blocks_of_lines(path: Path) -> Iterator[list[bytes]]:
    offset, lines = 0, [b""]
    while lines:
        with path.open("rb") as file:
            file.seek(offset)
            lines = file.readlines(BLOCK_BYTES)
        yield lines
        offset += sum(map(len, lines))


def shown(names: Iterable[str], most: int = 12) -> str:
    """Returns names for a message; those that are empty or have spaces around them in quotes."""
    known = [name if name and name == name.strip() else repr(name) for name in names]
    known = [name if len(name) <= 40 else f"{name[:37]}..." for name in known]
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


def refuse_twins(path: Path, header: Sequence[str]) -> None:
    """Refuses a header in which two columns have one name, or none, as empty columns behind the last one.

    Raises:
        UserError: There are such columns.
    """
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice:
        raise UserError(f"{path} has two columns {twice!r}; rename or remove one")
    if twice is not None:
        raise UserError(f"{path} has {header.count('')} columns without a name; name or remove them")


def unified(schemas: list[pa.Schema], path: Path) -> pa.Schema:
    """Returns the schema that holds the rows of all.

    Raises:
        UserError: A column has no common type.
    """
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(
            f"{path}: a column has no common type in all rows ({first_line(error)}); give it one, or remove it"
        ) from None


def batched(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Yields rows in lists of :data:`ROWS_PER_BATCH`, the last one shorter."""
    while batch := list(islice(records, ROWS_PER_BATCH)):
        yield batch


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _nth(records: Iterator[Record], row: int) -> Record:
    return next(islice(records, row, None))

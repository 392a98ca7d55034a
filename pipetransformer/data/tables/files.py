"""Files of tables: each format read batch by batch, with the line of every row for messages.

A cell of a delimited file is text; JSON, parquet and Arrow have types of their own.
"""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipetransformer.errors import UserError

ROWS_PER_BATCH = 1000
MOST_CHARACTERS = 10_000_000  # of a cell; more are a quote that is never closed
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
        for records in _batched(self.records()):
            yield _as_batch([row for _, row in records], schema)

    def at(self, row: int) -> str:
        return f"{self.path} {self.unit} {_nth(self.records(), row)[0]}"


class DelimitedFile(RecordFile):
    """CSV with quoted cells (RFC 4180), or TSV, where a quote is an ordinary character. The first line is the header.

    A delimiter that is given makes it CSV.
    """

    def schema(self) -> pa.Schema:
        return pa.schema([(name, pa.string()) for name in self._header(self._cells())])

    def records(self) -> Iterator[Record]:
        cells = self._cells()
        header = self._header(cells)
        for line, row in cells:
            if len(row) != len(header):
                raise UserError(
                    f"{self.path} line {line} has {len(row)} cells and the header has {len(header)} "
                    f"({shown(header)}); {self._advice}"
                )
            yield line, dict(zip(header, row, strict=True))

    def _header(self, cells: Iterator[tuple[int, list[str]]]) -> list[str]:
        _, header = next(cells, (0, []))
        if not header:
            raise UserError(f"{self.path} is empty; give a file with a header line and one row per sample")
        if twice := next((name for name in header if header.count(name) > 1), None):
            raise UserError(f"{self.path} has two columns {twice!r}; rename or remove one")
        return header

    def _cells(self) -> Iterator[tuple[int, list[str]]]:
        """Yields the cells of each line that is not blank, and the line that they begin in."""
        csv.field_size_limit(MOST_CHARACTERS)
        quoting = csv.QUOTE_MINIMAL if self._has_quotes else csv.QUOTE_NONE
        rows = csv.reader(text_lines(self.path), strict=True, delimiter=self._delimiter, quoting=quoting)
        line = 1
        try:
            for cells in rows:
                if cells:
                    yield line, cells
                line = rows.line_num + 1
        except csv.Error as error:
            raise UserError(f"{self.path} line {line} cannot be read ({error}); {self._advice}") from None

    @property
    def _has_quotes(self) -> bool:
        return self.delimiter is not None or self.path.suffix.lower() == ".csv"

    @property
    def _delimiter(self) -> str:
        return self.delimiter or ("," if self._has_quotes else "\t")

    @property
    def _advice(self) -> str:
        if not self._has_quotes:
            return "a .tsv file has no quotes around cells; for one that does, give dataset.delimiter=tab"
        return (
            f'put a cell that holds {self._delimiter!r}, a quote or a line break in quotes, with "" for a quote in it'
        )


class JsonFile(RecordFile):
    """Objects in JSON: one per line, or a list, which is read at once. Keys are columns; a missing one is null."""

    def schema(self) -> pa.Schema:
        seen = _Kinds(self.path)
        schemas = [seen.schema(records) for records in _batched(self.records())]
        if not schemas:
            raise UserError(f"{self.path} has no rows; give one JSON object per line")
        return _unified(schemas, self.path)

    @property
    def _is_list(self) -> bool:
        first = next((line.strip() for line in text_lines(self.path) if line.strip()), "")
        return first.startswith("[")

    @property
    def unit(self) -> str:
        return "row" if self._is_list else "line"

    def records(self) -> Iterator[Record]:
        unit = self.unit
        for number, row in self._listed() if unit == "row" else self._lines():
            if not isinstance(row, dict):
                raise UserError(f'{self.path} {unit} {number} is {kind(row)}; give an object like {{"text": ...}}')
            yield number, row

    def _lines(self) -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(text_lines(self.path), 1):
            if line.strip():
                yield number, self._parsed(line.rstrip("\r\n"), number)

    def _listed(self) -> Iterator[tuple[int, Any]]:
        yield from enumerate(self._parsed("".join(text_lines(self.path)), 1))

    def _parsed(self, text: str, line: int) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            inside, reason = getattr(error, "lineno", 1), getattr(error, "msg", "nested too deeply")
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise UserError(
                f"{self.path} line {line + inside - 1} is no JSON ({reason}{column}); give one object per line, or one "
                "list of objects"
            ) from None


class ArrowTable(TableFile):
    """Columns with types, in batches: parquet, or Arrow's stream and file formats."""

    def schema(self) -> pa.Schema:
        with self._reading():
            schema, _ = self._open()
        return pa.schema([each.with_type(_plain_type(each.type)) for each in schema], schema.metadata)

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with self._reading():
            _, batches = self._open()
            for batch in batches:
                yield from pa.Table.from_batches([batch]).select(schema.names).cast(schema).to_batches()

    def at(self, row: int) -> str:
        return f"{self.path} row {row}"

    def _open(self) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
        if self.path.suffix.lower() == ".parquet":
            parquet = pq.ParquetFile(self.path, memory_map=True)
            return parquet.schema_arrow, parquet.iter_batches(ROWS_PER_BATCH)
        source = pa.memory_map(str(self.path))
        try:
            stream = pa.ipc.open_stream(source)
            return stream.schema, stream
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(source)
            return file.schema, map(file.get_batch, range(file.num_record_batches))

    def _reading(self) -> _Reading:
        return _Reading(self.path)


class _Reading:
    """Context in which Arrow's errors become the user's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, pa.ArrowException | OSError):
            ending = self._path.suffix
            raise UserError(
                f"{self._path} is no {ending} file that can be read ({_first_line(error)}); write it again"
            ) from None


Formats = Mapping[str, Callable[[Path, str | None], TableFile]]
"""How files are read, by their ending."""
FORMATS: Formats = {
    ".csv": DelimitedFile,
    ".tsv": DelimitedFile,
    ".jsonl": JsonFile,
    ".ndjson": JsonFile,
    ".json": JsonFile,
    ".parquet": ArrowTable,
    ".arrow": ArrowTable,
}


def open_table(path: Path, delimiter: str | None = None, formats: Formats = FORMATS) -> TableFile:
    """Returns the file by its ending. It is not opened yet.

    Raises:
        UserError: The ending is none of the formats.
    """
    make = formats.get(path.suffix.lower())
    if make is None:
        raise UserError(
            f"{path} is no table: its name ends in {path.suffix or 'nothing'}; give one of {', '.join(formats)}"
        )
    return make(path, delimiter)


def common_schema(files: Iterable[TableFile]) -> pa.Schema:
    """Returns the schema of files that are one table.

    Raises:
        UserError: They have other columns, or columns of other types.
    """
    first, *others = ((file.path, file.schema()) for file in files)
    for path, schema in others:
        if different := {*schema.names} ^ {*first[1].names}:
            raise UserError(f"{path} and {first[0]} are of one split, and only one has {shown(sorted(different))}")
    return _unified([first[1], *(schema for _, schema in others)], first[0])


def text_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file with their ends, without a byte-order mark.

    Raises:
        UserError: A line is not UTF-8, or has a NUL byte.
    """
    number = 1
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
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


def shown(names: Iterable[str], most: int = 12) -> str:
    """Returns names for a message; those that are empty or have spaces around them in quotes."""
    known = [name if name and name == name.strip() else repr(name) for name in names]
    known = [name if len(name) <= 40 else f"{name[:37]}..." for name in known]
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


def kind(value: Any) -> str:
    """Returns what a value of JSON is, for a message."""
    names = ((bool, "true or false"), (int | float, "a number"), (str, "text"), (list, "a list"), (dict, "an object"))
    return next((name for types, name in names if isinstance(value, types)), "null")


class _Kinds:
    """The kind of value that each column has, and where it was seen first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first: dict[str, tuple[str, int]] = {}

    def schema(self, records: Iterable[Record]) -> pa.Schema:
        """Returns the types of some rows.

        Raises:
            UserError: A column has another kind of value than in the rows before.
        """
        for line, row in records:
            for name, value in row.items():
                if value is not None:
                    self._look(name, value, line)
        rows = [row for _, row in records]
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.schema([(name, _type_of([row.get(name) for row in rows], name, self._path)) for name in names])

    def _look(self, name: str, value: Any, line: int) -> None:
        found = kind(value)
        expected, first = self._first.setdefault(name, (found, line))
        if found != expected:
            raise UserError(
                f"{self._path}: {name} is {found} in line {line} ({_short(value)}) and {expected} in line {first}; "
                "give it one type in all rows"
            )


def _type_of(values: list[Any], name: str, path: Path) -> pa.DataType:
    try:
        return pa.array(values).type
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise UserError(f"{path}: the values of {name} have no common type ({_first_line(error)})") from None


def _unified(schemas: list[pa.Schema], path: Path) -> pa.Schema:
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(f"{path}: a column has no common type in all rows ({_first_line(error)})") from None


def _as_batch(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = [pa.array([row.get(each.name) for row in rows], each.type) for each in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the values of a dictionary (a category of pandas), else the type itself."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _batched(records: Iterator[Record]) -> Iterator[list[Record]]:
    while batch := list(islice(records, ROWS_PER_BATCH)):
        yield batch


def _nth(records: Iterator[Record], row: int) -> Record:
    return next(islice(records, row, None))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."

"""JSON, an object per row: values have the types of JSON, the same in all rows of a column."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipetransformer.data.tables.base import Record, RecordFile, batched, first_line, text_lines, unified
from pipetransformer.errors import UserError

ERRORS = (pa.ArrowException, ValueError, OverflowError)  # of Arrow, for values of several types


class JsonFile(RecordFile):
    """Objects in JSON: one per line, or a list, which is read at once. Keys are columns; a missing one is null."""

    def schema(self) -> pa.Schema:
        seen = _Kinds(self.path, self.unit)
        schemas = [seen.schema(records) for records in batched(self.records())]
        if not schemas:
            raise UserError(f"{self.path} has no rows; give one JSON object per line")
        return unified(schemas, self.path)

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


class _Kinds:
    """The kind of value that each column has, and where it was seen first."""

    def __init__(self, path: Path, unit: str) -> None:
        self._path, self._unit = path, unit
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
        names = dict.fromkeys(name for _, row in records for name in row)
        return pa.schema([(name, self._type_of([*records], name)) for name in names])

    def _type_of(self, records: Sequence[Record], name: str) -> pa.DataType:
        values = [row.get(name) for _, row in records]
        try:
            return pa.array(values).type
        except ERRORS as error:
            row = bisect_left(range(1, len(values)), True, key=lambda count: not _has_type(values[:count]))
            place = f"{self._path} {self._unit} {records[row][0]}"
            if isinstance(error, UnicodeEncodeError):
                half = json.dumps(error.object[error.start])
                raise UserError(
                    f"{place}: {name} has {half}, half of a character of two parts; write both, or remove it"
                ) from None
            raise UserError(
                f"{place}: {name} is {_short(values[row])}, and its values have no common type ({first_line(error)}); "
                "give it one type in all rows, or remove the column"
            ) from None

    def _look(self, name: str, value: Any, line: int) -> None:
        found = kind(value)
        expected, first = self._first.setdefault(name, (found, line))
        if found != expected:
            raise UserError(
                f"{self._path}: {name} is {found} in {self._unit} {line} ({_short(value)}) and {expected} in "
                f"{self._unit} {first}; give it one type in all rows"
            )


def kind(value: Any) -> str:
    """Returns what a value of JSON is, for a message."""
    names = ((bool, "true or false"), (int | float, "a number"), (str, "text"), (list, "a list"), (dict, "an object"))
    return next((name for types, name in names if isinstance(value, types)), "null")


def _has_type(values: list[Any]) -> bool:
    try:
        pa.array(values)
    except ERRORS:
        return False
    return True


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."

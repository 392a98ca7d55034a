"""JSON, an object per row: values have the types of JSON, the same in all rows of a column."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipetransformer.data.tables.base import Record, RecordFile, batched, first_line, text_lines, unified
from pipetransformer.errors import UserError


class JsonFile(RecordFile):
    """Objects in JSON: one per line, or a list, which is read at once. Keys are columns; a missing one is null."""

    def schema(self) -> pa.Schema:
        seen = _Kinds(self.path)
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


def kind(value: Any) -> str:
    """Returns what a value of JSON is, for a message."""
    names = ((bool, "true or false"), (int | float, "a number"), (str, "text"), (list, "a list"), (dict, "an object"))
    return next((name for types, name in names if isinstance(value, types)), "null")


def _type_of(values: list[Any], name: str, path: Path) -> pa.DataType:
    try:
        return pa.array(values).type
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise UserError(f"{path}: the values of {name} have no common type ({first_line(error)})") from None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."

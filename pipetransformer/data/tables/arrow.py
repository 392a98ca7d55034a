"""Parquet and Arrow: columns with types, in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipetransformer.data.tables.base import ROWS_PER_BATCH, TableFile, first_line
from pipetransformer.errors import UserError

VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


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
                columns = [_plain(batch.column(each.name), each.type) for each in schema]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

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
                f"{self._path} is no {ending} file that can be read ({first_line(error)}); write it again"
            ) from None


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the values of a dictionary (a category of pandas or polars), else the type itself.

    Views, in which polars keeps texts, become what the ``datasets`` library and Arrow's own functions read.
    """
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_plain_type(each.type)) for each in kind.fields])
    return VIEWS.get(kind, kind)


def _plain(cells: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns cells as another type; Arrow decodes no dictionary whose values are views."""
    if pa.types.is_dictionary(cells.type):
        cells = _plain(cells.dictionary, kind).take(cells.indices)
    return cells.cast(kind)

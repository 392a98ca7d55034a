"""CSV and TSV: text in cells, whose first line is the header."""

from __future__ import annotations

import csv
from collections.abc import Iterator

import pyarrow as pa

from pipetransformer.data.tables.base import Record, RecordFile, refuse_twins, shown, text_lines
from pipetransformer.errors import UserError

MOST_CHARACTERS = 10_000_000  # of a cell; more are a quote that is never closed


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
        refuse_twins(self.path, header)
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
            if "new-line character" in str(error):
                raise UserError(
                    f"{self.path} line {line} has a carriage return within a cell; remove it, or if lines end in one "
                    "alone, convert the file: tr '\\r' '\\n'"
                ) from None
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

"""Plain text as rows of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from pipetransformer.data.tables.base import Record, RecordFile, text_lines
from pipetransformer.errors import UserError

TEXT = "text"


@dataclass(frozen=True)
class TextFile(RecordFile):
    """A row is a document, and its only column is ``text``.

    Attributes:
        sample_by: A document is a ``line``, a ``paragraph`` up to a blank line, or the whole file, a ``document``; the
            words of the ``datasets`` library. Blank lines are no documents.
    """

    sample_by: str = "line"

    def schema(self) -> pa.Schema:
        if next(self.records(), None) is None:
            raise UserError(f"{self.path} has no text; give a file with documents")
        return pa.schema([(TEXT, pa.string())])

    def records(self) -> Iterator[Record]:
        first, lines = 1, []
        for number, line in enumerate(text_lines(self.path), 1):
            is_blank = not line.strip()
            if lines and (self.sample_by == "line" or (is_blank and self.sample_by == "paragraph")):
                yield first, _row(lines)
                lines = []
            if lines or not is_blank:
                first = first if lines else number
                lines.append(line)
        if lines:
            yield first, _row(lines)


def _row(lines: list[str]) -> dict[str, str]:
    return {TEXT: "".join(lines).rstrip("\r\n")}

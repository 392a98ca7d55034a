"""Files of tables by their ending, each read batch by batch.

A cell of a delimited file is text; JSON, parquet and Arrow have types of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from pipetransformer.data.tables.arrow import ArrowTable
from pipetransformer.data.tables.base import TableFile, shown, unified
from pipetransformer.data.tables.delimited import DelimitedFile
from pipetransformer.data.tables.json_files import JsonFile
from pipetransformer.errors import UserError

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
    return unified([first[1], *(schema for _, schema in others)], first[0])

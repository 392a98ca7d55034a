"""Rows of a split as memory-mapped Arrow. Files of tables are converted to it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features
from filelock import FileLock, Timeout

from pipetransformer.data.base import Digest
from pipetransformer.data.hub import cache_folder
from pipetransformer.data.tables.base import ROWS_PER_BATCH, TableFile, first_line, shown
from pipetransformer.data.tables.files import FORMATS, Formats, common_schema, open_table
from pipetransformer.data.tables.spec import DELIMITERS
from pipetransformer.errors import UserError

VERSION = 2  # of what is converted; another one converts anew
LOCK_TIMEOUT_S = 3600.0  # of one process for another one that converts the same file


class Rows:
    """Rows of one split. Cells are read from disk when they are asked for.

    Attributes:
        data: The rows as the ``datasets`` library has them.
        name: The file or the split, for messages.
    """

    def __init__(
        self, data: Dataset, name: str, place: Callable[[int], str], numbers: np.ndarray | None = None
    ) -> None:
        self.data, self.name, self._place = data, name, place
        self._numbers = np.arange(len(data)) if numbers is None else numbers  # of these rows in the whole split

    def __len__(self) -> int:
        return len(self.data)

    @property
    def features(self) -> Features:
        """The type of each column by its name."""
        return self.data.features

    def at(self, row: int) -> str:
        """Names the place of a row for a message: file and line, or split and row."""
        return self._place(int(self._numbers[row]))

    def take(self, rows: np.ndarray) -> Rows:
        """Returns some of the rows, (n,) of their numbers, in this order."""
        return Rows(cast("Dataset", self.data.select(rows)), self.name, self._place, self._numbers[rows])

    def require(self, option: str, column: str) -> None:
        """Raises UserError when there is no such column; the message knows the one that may be meant.

        Args:
            option: As the user wrote it, for example ``dataset.text``.
            column: Its name.
        """
        if column in self.features:
            return
        names = [*self.features]
        near = get_close_matches(column, names, n=1, cutoff=0.5)
        other = [word for word, mark in DELIMITERS.items() if len(names) == 1 and mark in names[0] and word.isalpha()]
        question = f"; did you mean {near[0]}?" if near else ""
        question = f"; if a {other[0]} is between its cells, give dataset.delimiter={other[0]}" if other else question
        raise UserError(f"{option}={column}: {self.name} has no such column; it has {shown(names)}{question}")

    def column(self, name: str) -> pa.ChunkedArray:
        """Returns one column whole, as for labels."""
        return self.data.select_columns(name).with_format("arrow")[:][name]

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yields some columns batch by batch, each with the number of its first row."""
        chosen = self.data.select_columns(list(columns)).with_format("arrow")
        for first in range(0, len(self), ROWS_PER_BATCH):
            yield first, chosen[first : first + ROWS_PER_BATCH]


def read_files(files: tuple[Path, ...], delimiter: str | None = None, formats: Formats = FORMATS) -> Rows:
    """Reads the files of one split, in order.

    Raises:
        UserError: A file or a row cannot be read, or there are no rows.
    """
    tables = [open_table(file, delimiter, formats) for file in files]
    try:
        data = Dataset.from_file(str(_converted(tables)))
    except UserError:  # a ValueError, too
        raise
    except (NotImplementedError, ValueError, pa.ArrowException) as error:
        raise UserError(
            f"{files[0]} has a column of a type that datasets does not know ({first_line(error)}); remove the column "
            "or write it as another type"
        ) from error
    if len(data) == 0:
        raise UserError(f"{files[0]} has columns ({shown(data.features)}) and no rows")
    return Rows(data, ", ".join(map(str, files)), partial(_place, tables))


def _place(tables: list[TableFile], row: int) -> str:
    """Returns the place of a row in the files of a split, which are read for it."""
    for table in tables[:-1]:
        num_rows = sum(batch.num_rows for batch in table.batches(table.schema()))
        if row < num_rows:
            return table.at(row)
        row -= num_rows
    return tables[-1].at(row)


def _converted(tables: list[TableFile]) -> Path:
    """Returns the Arrow file with the rows of all tables, which the first process that asks for it writes.

    It lies in the cache of ``datasets`` under a name that follows the files' paths, sizes and times.
    """
    file = cache_folder() / "pipetransformer" / f"{_stamp(tables)}.arrow"
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(file.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
                if not file.exists():  # no other process has written it meanwhile
                    _convert(tables, file)
    except Timeout as error:
        raise UserError(f"another process has held {error.lock_file} for {LOCK_TIMEOUT_S:.0f} s; end it") from None
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror}); set HF_DATASETS_CACHE to a folder with room"
        ) from error
    return file


def _stamp(tables: list[TableFile]) -> str:
    digest = Digest("table")
    for table in tables:
        facts = table.path.stat()
        digest.add(VERSION, repr(replace(table, path=table.path.resolve())), facts.st_size, facts.st_mtime_ns)
    return digest.hex()


def _convert(tables: list[TableFile], file: Path) -> None:
    schema, incomplete = common_schema(tables), file.with_suffix(".incomplete")
    try:
        with pa.OSFile(str(incomplete), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for table in tables:
                for batch in table.batches(schema):
                    writer.write_batch(batch)
        incomplete.replace(file)
    finally:
        incomplete.unlink(missing_ok=True)

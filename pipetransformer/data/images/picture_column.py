"""Pictures of a table: a column of paths, or of pictures in the table itself. Each is read when it is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import pyarrow as pa

from pipetransformer.data.hub import fingerprint
from pipetransformer.data.images.decoding import check_picture, read_picture
from pipetransformer.data.images.folders import file_stamp
from pipetransformer.data.images.sources import ImageSource
from pipetransformer.data.tables.label_cells import is_text, pc
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.data.tables.rows import Rows

T = TypeVar("T")


class PictureColumn:
    """The pictures of a column.

    A cell is a path, the bytes of a file, or both as the ``datasets`` library stores them (``datasets.Image``).

    Args:
        rows: The rows.
        column: Name of the column.
        folders: Folders that no path leads out of; a relative one begins in the first.
        is_published: The rows are of the hub, whose fingerprint tells them apart from others.

    Raises:
        UserError: There is no such column, or it holds something else.
    """

    def __init__(self, rows: Rows, column: str, folders: Sequence[Path], is_published: bool = False) -> None:
        rows.require("dataset.image", column)
        kind = rows.features.arrow_schema.field(column).type
        if not (is_text(kind) or _is_binary(kind) or _has_bytes(kind)):
            raise UserError(
                f"dataset.image={column}: {rows.name} has cells of type {kind} there; name a column of paths or "
                "of pictures"
            )
        self._rows, self._column = rows, column
        self._cells = rows.data.select_columns(column).with_format("arrow")
        self._folders = tuple(os.path.abspath(folder) for folder in folders)
        self._resolved = tuple(map(os.path.realpath, self._folders))
        self._published = f"{fingerprint(rows.data)} {column}" if is_published else None

    def source(self, labels: np.ndarray) -> ImageSource:
        """Returns the pictures with their labels, as colour."""
        return ImageSource(
            lambda indices: [
                self._use(read_picture, int(row), cell) for row, cell in zip(indices, self._at(indices), strict=True)
            ],
            labels,
            lambda indices: 3,
            self._stamp,
            lambda row: self._use(check_picture, row, *self._at(np.array([row]))),
        )

    def names(self) -> list[dict[str, Any]]:
        """Returns for each row its number as ``row``, and where the column has paths that in it as ``file``."""
        numbers = [{"row": row} for row in range(len(self._rows))]
        kind = self._rows.features.arrow_schema.field(self._column).type
        if not is_text(kind) and not (pa.types.is_struct(kind) and kind.get_field_index("path") >= 0):
            return numbers
        cells = self._rows.column(self._column)
        paths = cells if is_text(kind) else pc.struct_field(cells, "path")
        return [number | {"file": path} for number, path in zip(numbers, paths.to_pylist(), strict=True)]

    def check_all(self) -> None:
        """Looks whether every row has a picture, without opening one.

        Raises:
            UserError: A cell is empty, or its path leads to no file or out of the folders.
        """
        for first, table in self._rows.batches([self._column]):
            cells = table[self._column]
            for number in _without_content(cells).tolist():
                self._found(first + number, cells[number].as_py())

    def _at(self, indices: np.ndarray) -> list[Any]:
        cells = cast("pa.Table", self._cells[np.asarray(indices)])
        return cells[self._column].to_pylist()

    def _use(self, use: Callable[[Path | bytes, str], T], row: int, cell: Any) -> T:
        """Calls ``use`` with a picture, and again with its name where that fails: a row's line takes reading a file."""
        stored = self._inside(row, cell)
        try:
            return use(stored, "")
        except UserError:
            path, _ = _parts(cell)
            return use(stored, f"{self._rows.at(row)}: {path or self._column}")

    def _inside(self, row: int, cell: Any) -> Path | bytes:
        """Returns where a picture lies, with links resolved."""
        found = self._found(row, cell)
        if isinstance(found, bytes):
            return found
        if not _is_within(os.path.realpath(found), self._resolved):
            raise self._outside(row, found)
        return Path(found)

    def _found(self, row: int, cell: Any) -> str | bytes:
        """Returns where a picture lies by its path alone."""
        path, content = _parts(cell)
        if content is not None:
            return content
        if path is None or not path.strip():
            raise UserError(f"{self._rows.at(row)} has no {self._column}; write a path there or remove the row")
        if "://" in path:
            raise UserError(
                f"{self._rows.at(row)}: {self._column} is {path!r}, an address and no file; fetch the pictures first"
            )
        file = os.path.normpath(os.path.join(self._folders[0], path))
        if not _is_within(file, self._folders):
            raise self._outside(row, path)
        if not os.path.isfile(file):
            found = "is a folder" if os.path.isdir(file) else "does not exist"
            raise UserError(
                f"{self._rows.at(row)}: {self._column} is {path!r}, and {file} {found}; correct it, remove the row, or "
                "give the folder that paths begin in by dataset.root="
            )
        return file

    def _outside(self, row: int, path: str) -> UserError:
        return UserError(
            f"{self._rows.at(row)}: {self._column} is {path!r}, which leads out of {self._folders[0]}; give the folder "
            "in which all paths begin and stay by dataset.root="
        )

    def _stamp(self, row: int) -> str:
        if self._published is not None:
            return f"{self._published} {row}"
        (cell,) = self._at(np.array([row]))
        stored = self._inside(row, cell)
        return file_stamp(stored) if isinstance(stored, Path) else blake2b(stored, digest_size=16).hexdigest()


def _is_within(file: str, folders: Sequence[str]) -> bool:
    """Returns whether a file lies in one of the folders; strings, as a table may have millions."""
    return any(file.startswith(os.path.join(folder, "")) for folder in folders)


def _parts(cell: Any) -> tuple[str | None, bytes | None]:
    """Returns path and content of a picture, of which one may be missing."""
    if isinstance(cell, dict):
        return cell.get("path"), cell.get("bytes")
    return (None, cell) if isinstance(cell, bytes) else (cell, None)


def _without_content(cells: pa.ChunkedArray) -> np.ndarray:
    """Returns the numbers of cells that have no bytes of a picture in them, ascending."""
    if is_text(cells.type):
        return np.arange(len(cells))
    content = pc.struct_field(cells, "bytes") if _has_bytes(cells.type) else cells
    return np.flatnonzero(pc.is_null(content).to_numpy(zero_copy_only=False))


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _has_bytes(kind: pa.DataType) -> bool:
    """Returns whether cells are as those of ``datasets.Image``."""
    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0

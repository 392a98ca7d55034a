"""Digest of plain values and arrays, equal for two splits that give a model the same inputs."""

from hashlib import blake2b

import numpy as np

Plain = str | int | float | None | tuple[int, ...]


class Digest:
    """Digest of one value after the other; where one ends and the next begins is part of it.

    Args:
        kind: Name of what is digested, so that different things never have one digest.
    """

    def __init__(self, kind: str) -> None:
        self._hash = blake2b(digest_size=16)
        self.add(kind)

    def add(self, *values: Plain | np.ndarray) -> None:
        """Adds values by their type and content. Arrays are read where they lie, unless their memory has gaps."""
        for value in values:
            if isinstance(value, np.ndarray):
                assert not value.dtype.hasobject, "addresses of objects say nothing"
                self._frame(b"array", f"{value.dtype.str} {value.shape}".encode())
                self._hash.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            else:
                self._frame(b"value", repr(value).encode())

    def _frame(self, kind: bytes, content: bytes) -> None:
        self._hash.update(kind + len(content).to_bytes(8, "little") + content)

    def hex(self) -> str:
        """Returns 128 bits in hexadecimal digits."""
        return self._hash.hexdigest()

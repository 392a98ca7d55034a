"""A digest of plain values and arrays, by which two splits tell whether they give a model the same."""

from hashlib import blake2b

import numpy as np

Plain = str | int | float | None | tuple[int, ...]


class Digest:
    """Takes one value after the other; where one ends and the next begins is part of the digest.

    Args:
        kind: What is digested, so that different things never look alike.
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
        """128 bits in hexadecimal digits."""
        return self._hash.hexdigest()

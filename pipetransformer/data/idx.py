"""The IDX file format of MNIST and its kin: a typed array with a big-endian header (yann.lecun.com/exdb/mnist)."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from pipetransformer.errors import UserError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_FOLDER = f"a folder with {', '.join(FILES)}, each plain or as .gz"
PACKAGE_FILES = Path("/var/lib/dpkg/info/dataset-fashion-mnist.list")
UNSIGNED_BYTE = 0x08
MAX_DIMS = 8


def read_idx(file: Path) -> np.ndarray:
    """Reads an array of unsigned bytes, gzipped or not.

    Raises:
        UserError: The file is damaged, cut short, or not of this format.
    """
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise UserError(f"{file} cannot be unpacked ({error}); fetch it again") from error
    if len(content) < 4 or content[:3] != bytes((0, 0, UNSIGNED_BYTE)):
        raise UserError(f"{file} is not an IDX file of unsigned bytes; it starts with {content[:4].hex()}")
    num_dims = content[3]
    header_bytes = 4 + 4 * num_dims
    shape = struct.unpack(f">{num_dims}I", content[4:header_bytes]) if len(content) >= header_bytes else ()
    if not shape or num_dims > MAX_DIMS or len(content) != header_bytes + math.prod(shape):
        raise UserError(f"{file} holds {len(content)} bytes, which does not fit its shape {shape}; fetch it again")
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)


def find_files(folder: Path) -> list[Path]:
    """Finds the four files of :data:`FILES`, in that order.

    Raises:
        UserError: Some are missing.
    """
    found = [next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None) for name in FILES]
    if missing := [name for name, file in zip(FILES, found, strict=True) if file is None]:
        raise UserError(f"dataset.path={folder} lacks {', '.join(missing)}; give {IDX_FOLDER}")
    return [file for file in found if file is not None]


def packaged_folder(package_files: Path = PACKAGE_FILES) -> Path | None:
    """Returns the folder of Debian's package dataset-fashion-mnist; ``None`` where it is not installed."""
    lines = package_files.read_text().splitlines() if package_files.is_file() else []
    return next((Path(line).parent for line in lines if Path(line).name.startswith(FILES[0])), None)

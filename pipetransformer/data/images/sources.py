"""Labelled images from arrays, IDX files and the hub, before they are fitted to a model."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipetransformer.cores import num_cores
from pipetransformer.data.base import Digest, subsample
from pipetransformer.data.hub import download_folders, fingerprint, load_hub
from pipetransformer.data.images.decoding import DECODING, is_grey, named, to_array
from pipetransformer.errors import UserError

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_FOLDER = f"a folder with {', '.join(IDX_FILES)}, each plain or as .gz"
PACKAGE_FILES = Path("/var/lib/dpkg/info/dataset-fashion-mnist.list")
UNSIGNED_BYTE = 0x08
MAX_DIMS = 8
MAX_CHECKED = 50_000  # files of a split that are looked at before the start; each takes 0.1 to 0.7 ms
T = TypeVar("T")


@dataclass(frozen=True)
class ImageSource:
    """Images that are decoded when they are read.

    Attributes:
        decode: Maps indices (B,) to their images of uint8, each (H, W, C), or all in one array (B, H, W, C).
        labels: Of each image the class (N,) of int64, the value (N,) of float64, or 1 and 0 for each class (N, C).
        channels: Maps indices (B,) to the channels that hold all of these images: 3 where one has colour.
        stamp: Identifies an image without decoding it; ``None``: its pixels do, which takes decoding all.
        check: Raises UserError where an image cannot be decoded; ``None`` where all are known to be whole.
    """

    decode: Callable[[np.ndarray], Sequence[np.ndarray] | np.ndarray]
    labels: np.ndarray
    channels: Callable[[np.ndarray], int]
    stamp: Callable[[int], str] | None = None
    check: Callable[[int], None] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_channels(self) -> int:
        """Channels that hold all images."""
        return self.channels(np.arange(len(self)))

    def identity(self) -> str:
        """Returns a hex digest of all images in their order, the labels left out."""
        digest = Digest("pictures")
        digest.add(None if self.stamp is None else f"decoded by Pillow {metadata.version('pillow')}, {DECODING}")
        for index in range(len(self)):
            digest.add(self.decode(np.array([index]))[0] if self.stamp is None else self.stamp(index))
        return digest.hex()

    def take(self, ids: np.ndarray) -> ImageSource:
        """Returns the images with these ids (M,), in their order."""

        return ImageSource(
            lambda indices: self.decode(ids[indices]),
            self.labels[ids],
            lambda indices: self.channels(ids[indices]),
            _over(ids, self.stamp),
            _over(ids, self.check),
        )

    def in_memory(self) -> ImageSource:
        """Decodes everything once."""
        return from_list([self.decode(np.array([index]))[0] for index in range(len(self))], self.labels)

    def errors(self) -> list[str]:
        """Checks every image, in as many threads as there are cores, and returns what is wrong with some."""
        if self.check is None:
            return []
        with ThreadPoolExecutor(num_cores()) as threads:
            return [error for error in threads.map(self._error, range(len(self))) if error]

    def _error(self, index: int) -> str:
        assert self.check is not None
        try:
            self.check(index)
        except ValueError as error:
            return str(error)
        return ""


def refuse_damaged(sources: Iterable[ImageSource], most: int = MAX_CHECKED) -> None:
    """Raises UserError where a picture cannot be decoded. Of a source with more than ``most`` a fixed draw is checked.

    Args:
        sources: The pictures of each split.
        most: Pictures of a split that are looked at.
    """
    errors = [error for source in sources for error in source.take(subsample(len(source), most)).errors()]
    if errors:
        raise UserError(errors[0] + (f"; {len(errors) - 1} more cannot be read" if len(errors) > 1 else ""))


@dataclass(frozen=True)
class ImageSplits:
    """Two splits, the name of the second, the names of the classes, and what the user should know of."""

    train: ImageSource
    evaluation: ImageSource
    evaluation_name: str
    classes: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def _over(ids: np.ndarray, function: Callable[[int], T] | None) -> Callable[[int], T] | None:
    return None if function is None else lambda index: function(int(ids[index]))


def from_arrays(images: np.ndarray, labels: np.ndarray) -> ImageSource:
    """Takes images (N, H, W) or (N, H, W, C) of uint8 and labels (N,)."""
    assert images.dtype == np.uint8, images.dtype
    images = images if images.ndim == 4 else images[..., None]
    return ImageSource(images.__getitem__, labels.astype(np.int64), lambda indices: images.shape[-1])


def from_list(images: list[np.ndarray], labels: np.ndarray) -> ImageSource:
    """Takes images of any sizes, each (H, W, C) of uint8, and labels (N,)."""
    return ImageSource(
        lambda indices: [images[index] for index in indices],
        labels,
        lambda indices: max((images[index].shape[-1] for index in indices), default=1),
    )


def from_hub(name: str, train: str, evaluation: str, columns: tuple[str, str], local_format: str) -> ImageSplits:
    """Takes two splits of a hub dataset; ``columns`` are those of the image and the label.

    Raises:
        UserError: The hub or a split cannot be reached, or has no such columns.
    """
    first, classes = _hub_split(name, train, columns, local_format)
    return ImageSplits(first, _hub_split(name, evaluation, columns, local_format)[0], evaluation, classes)


def _hub_split(
    name: str, split: str, columns: tuple[str, str], local_format: str
) -> tuple[ImageSource, tuple[str, ...]]:
    from datasets import Image as ImageFeature

    image_column, label_column = columns
    rows = load_hub(name, split, local_format)
    feature, classes = rows.features.get(image_column), getattr(rows.features.get(label_column), "names", None)
    if not isinstance(feature, ImageFeature) or classes is None:
        raise UserError(
            f"{name} has the columns {', '.join(rows.features)}; dataset.image_column={image_column} has to hold "
            f"images and dataset.label_column={label_column} classes with names"
        )
    stored = rows.cast_column(image_column, ImageFeature(decode=False))  # bytes, or the path of a file
    origin, roots = f"{fingerprint(rows)} {image_column}", [root.resolve() for root in download_folders(name)]

    def decode(indices: np.ndarray) -> list[np.ndarray]:
        images = []
        for index, image in zip(indices, stored[indices][image_column], strict=True):
            with named(f"picture {index} in split {split!r} of {name}"):
                _check_inside(image, roots)
                images.append(to_array(feature.decode_example(image)))
        return images

    def channels(indices: np.ndarray) -> int:
        for index in indices:
            image = stored[int(index)][image_column]
            with named(f"picture {index} in split {split!r} of {name}"):
                _check_inside(image, roots)
            if not is_grey(image):
                return 3
        return 1

    labels = np.asarray(rows[label_column][:], dtype=np.int64)
    return ImageSource(decode, labels, channels, lambda index: f"{origin} {index}"), tuple(classes)


def _check_inside(image: dict[str, Any], roots: Sequence[Path]) -> None:
    """Raises UserError where a row has a path in place of a picture's bytes that leads out of the downloaded files."""
    path = image["path"]
    if not image["bytes"] and not any(Path(str(path)).resolve().is_relative_to(root) for root in roots):
        raise UserError(f"its row names {path!r}, which is outside of the data's own files")


def read_idx(file: Path) -> np.ndarray:
    """Reads an array of unsigned bytes in the IDX format of MNIST and its kin, gzipped or not.

    It is a typed array with a big-endian header (yann.lecun.com/exdb/mnist).

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
    """Finds the four files of :data:`IDX_FILES`, in that order.

    Raises:
        UserError: Some are missing.
    """
    found = [
        next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None) for name in IDX_FILES
    ]
    if missing := [name for name, file in zip(IDX_FILES, found, strict=True) if file is None]:
        raise UserError(f"dataset.path={folder} lacks {', '.join(missing)}; give {IDX_FOLDER}")
    return [file for file in found if file is not None]


def packaged_folder(package_files: Path = PACKAGE_FILES) -> Path | None:
    """Returns the folder of Debian's package dataset-fashion-mnist; ``None`` where it is not installed."""
    lines = package_files.read_text().splitlines() if package_files.is_file() else []
    return next((Path(line).parent for line in lines if Path(line).name.startswith(IDX_FILES[0])), None)

"""Labelled images from arrays, IDX files, image folders and the hub, before they are fitted to a model."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipetransformer.data.base import Digest
from pipetransformer.data.hub import download_folders, fingerprint, load_hub
from pipetransformer.data.image_decoding import DECODING, check_file, is_grey, named, read_file, to_array
from pipetransformer.errors import UserError

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_FOLDER = f"a folder with {', '.join(IDX_FILES)}, each plain or as .gz"
PACKAGE_FILES = Path("/var/lib/dpkg/info/dataset-fashion-mnist.list")
UNSIGNED_BYTE = 0x08
MAX_DIMS = 8
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".pbm", ".webp", ".tif", ".tiff", ".gif")
IMAGE_FOLDER = "a folder with train/<class>/*.png and test/, val/ or validation/<class>/*.png"
T = TypeVar("T")


@dataclass(frozen=True)
class ImageSource:
    """Images that are decoded when they are read.

    Attributes:
        decode: Maps indices (B,) to their images of uint8, each (H, W, C), or all in one array (B, H, W, C).
        labels: Class of each image, shape (N,) of int64.
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
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return [error for error in threads.map(self._error, range(len(self))) if error]

    def _error(self, index: int) -> str:
        assert self.check is not None
        try:
            self.check(index)
        except ValueError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class ImageSplits:
    """Two splits, the name of the second, and the names of the classes."""

    train: ImageSource
    evaluation: ImageSource
    evaluation_name: str
    classes: tuple[str, ...]


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


def from_folder(root: Path) -> ImageSplits:
    """Takes ``train/<class>/**`` and the first of ``test``, ``val`` and ``validation`` beside it.

    A folder may mix grey and colour, and all of its images are read as colour, upright by their EXIF orientation.
    Files and folders whose names begin with a dot are left out, and so are files that do not end in one of
    :data:`SUFFIXES`.

    Raises:
        UserError: A folder is missing, or a class has files of which none is an image.
    """
    name, classes = folder_classes(root)
    return ImageSplits(_files(root / "train", classes), _files(root / name, classes), name, classes)


def folder_classes(root: Path) -> tuple[str, tuple[str, ...]]:
    """Returns the name of the evaluation folder, and the names of the classes; a folder without files is none.

    Raises:
        UserError: A folder is missing, or the evaluation folder has classes that training lacks.
    """
    name = next((name for name in ("test", "val", "validation") if (root / name).is_dir()), None)
    classes = _classes(root / "train")
    if name is None or not classes:
        raise UserError(f"dataset.path={root} is not an image folder; give {IMAGE_FOLDER}")
    if unknown := sorted({*_classes(root / name)} - {*classes}):
        raise UserError(f"{root / name} has {len(unknown)} classes that train/ lacks: {', '.join(unknown[:5])}")
    return name, classes


def _classes(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        return ()
    inside = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return tuple(sorted(entry.name for entry in inside if any(_visible_files(entry))))


def _visible_files(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and below it."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = (name for name in folders if not name.startswith("."))  # os.walk does not enter the others
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _files(folder: Path, classes: tuple[str, ...]) -> ImageSource:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(_visible_files(folder / name))
        images = [file for file in found if file.suffix.lower() in SUFFIXES]
        if found and not images:
            raise UserError(
                f"{folder / name} has {len(found)} files and no pictures, the first is {found[0].name}; give pictures "
                f"that end in one of {', '.join(SUFFIXES)}, or remove the folder"
            )
        files += images
        labels += [label] * len(images)
    return _of_files(files, np.array(labels, dtype=np.int64))


def unlabelled_files(source: Path) -> tuple[list[str], ImageSource]:
    """Takes all pictures in a folder and below it, or those that a text file lists, one path in each line.

    Returns:
        The path of each as it is listed, or from the folder; and the pictures, all of class 0.

    Raises:
        UserError: There are none, or a listed one is not there.
    """
    if source.is_dir():
        found = sorted(file for file in _visible_files(source) if file.suffix.lower() in SUFFIXES)
        names, files = [str(file.relative_to(source)) for file in found], found
    elif source.suffix.lower() in SUFFIXES:
        names, files = [source.name], [source]
    else:
        try:
            names = [line.strip() for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise UserError(f"input={source} is neither a folder nor a list of pictures ({error})") from error
        files = [source.parent / name for name in names]  # a whole path stays what it is
        if lost := [name for name, file in zip(names, files, strict=True) if not file.is_file()]:
            raise UserError(f"input={source} lists {lost[0]}, which is not there (nor are {len(lost) - 1} others)")
    if not files:
        raise UserError(f"input={source} has no pictures; give files that end in one of {', '.join(SUFFIXES)}")
    return names, _of_files(files, np.zeros(len(files), dtype=np.int64))


def _of_files(files: Sequence[Path], labels: np.ndarray) -> ImageSource:
    return ImageSource(
        lambda indices: [read_file(files[index]) for index in indices],
        labels,
        lambda indices: 3,
        lambda index: _stamp(files[index]),
        lambda index: check_file(files[index]),
    )


def _stamp(file: Path) -> str:
    """Returns the whole name, the size and the time of the last change; while all three stay, so does the image."""
    try:
        facts = file.stat()
    except OSError as error:
        raise UserError(f"{file} cannot be looked at ({error}); repair or remove it") from error
    return f"{file.absolute()} {facts.st_size} {facts.st_mtime_ns}"


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

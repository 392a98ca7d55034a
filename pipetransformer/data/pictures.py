"""Labelled pictures from arrays, image folders and the hub, before they are fitted to a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipetransformer.data.digest import Digest
from pipetransformer.data.hub import fingerprint, load_hub

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp")
IMAGE_FOLDER = "a folder with train/<class>/*.png and test/, val/ or validation/<class>/*.png"


@dataclass(frozen=True)
class Pictures:
    """Pictures that are decoded when they are read.

    Attributes:
        decode: Maps indices (B,) to their pictures of uint8, each (H, W, C), or all in one array (B, H, W, C).
        labels: Class of each picture, shape (N,) of int64.
        stamp: Tells a picture from others without decoding it; ``None``: its pixels do, which takes decoding all.
    """

    decode: Callable[[np.ndarray], Sequence[np.ndarray] | np.ndarray]
    labels: np.ndarray
    stamp: Callable[[int], str] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def identity(self) -> str:
        """A hex digest of all pictures in their order, the labels left out."""
        digest = Digest("pictures")
        digest.add(None if self.stamp is None else f"decoded by Pillow {metadata.version('pillow')}")
        for index in range(len(self)):
            digest.add(self.decode(np.array([index]))[0] if self.stamp is None else self.stamp(index))
        return digest.hex()

    def take(self, ids: np.ndarray) -> Pictures:
        stamp = self.stamp
        taken = None if stamp is None else lambda index: stamp(int(ids[index]))
        return Pictures(lambda indices: self.decode(ids[indices]), self.labels[ids], taken)

    def in_memory(self) -> Pictures:
        """Decodes everything once."""
        return from_list([self.decode(np.array([index]))[0] for index in range(len(self))], self.labels)


@dataclass(frozen=True)
class PictureSet:
    """What a source of pictures offers: two splits, the name of the second, and the names of the classes."""

    train: Pictures
    evaluation: Pictures
    evaluation_name: str
    classes: tuple[str, ...]


def from_arrays(images: np.ndarray, labels: np.ndarray) -> Pictures:
    """Takes images (N, H, W) or (N, H, W, C) of uint8 and labels (N,)."""
    assert images.dtype == np.uint8, images.dtype
    return Pictures((images if images.ndim == 4 else images[..., None]).__getitem__, labels.astype(np.int64))


def from_list(pictures: list[np.ndarray], labels: np.ndarray) -> Pictures:
    """Takes pictures of any sizes, each (H, W, C) of uint8, and labels (N,)."""
    return Pictures(lambda indices: [pictures[index] for index in indices], labels)


def from_hub(name: str, train: str, evaluation: str, columns: tuple[str, str], local_format: str) -> PictureSet:
    """Takes two splits of a hub dataset; ``columns`` are those of the image and the label."""
    image_column, label_column = columns

    def split(split_name: str) -> tuple[Pictures, tuple[str, ...]]:
        rows = load_hub(name, split_name, local_format)
        labels = np.asarray(rows[label_column][:], dtype=np.int64)
        origin = f"{fingerprint(rows)} {image_column}"
        found = Pictures(
            lambda indices: [_to_array(image) for image in rows[indices][image_column]],
            labels,
            lambda index: f"{origin} {index}",
        )
        return found, rows.features[label_column].names

    pictures, classes = split(train)
    return PictureSet(pictures, split(evaluation)[0], evaluation, tuple(classes))


def from_folder(root: Path) -> PictureSet:
    """Takes ``train/<class>/*`` and the first of ``test``, ``val`` and ``validation`` beside it."""
    name, classes = folder_classes(root)
    return PictureSet(_files(root / "train", classes), _files(root / name, classes), name, classes)


def folder_classes(root: Path) -> tuple[str, tuple[str, ...]]:
    """The name of the evaluation folder, and the names of the classes.

    Raises:
        ValueError: A folder is missing, or the evaluation folder has classes that training lacks.
    """
    name = next((name for name in ("test", "val", "validation") if (root / name).is_dir()), None)
    classes = _classes(root / "train")
    if name is None or not classes:
        raise ValueError(f"dataset.path={root} is not an image folder; give {IMAGE_FOLDER}")
    if unknown := sorted({*_classes(root / name)} - {*classes}):
        raise ValueError(f"{root / name} has {len(unknown)} classes that train/ lacks: {', '.join(unknown[:5])}")
    return name, classes


def _classes(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir())) if folder.is_dir() else ()


def _files(folder: Path, classes: tuple[str, ...]) -> Pictures:
    found = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted(folder.glob(f"{name}/*"))
        if file.suffix.lower() in SUFFIXES
    ]
    labels = np.array([label for _, label in found], dtype=np.int64)
    files = [file for file, _ in found]
    return Pictures(
        lambda indices: [_read_file(files[index]) for index in indices], labels, lambda index: _stamp(files[index])
    )


def _stamp(file: Path) -> str:
    """The whole name, the size and the time of the last change; what keeps all three counts as the same picture."""
    try:
        facts = file.stat()
    except OSError as error:
        raise ValueError(f"{file} cannot be looked at ({error}); repair or remove it") from error
    return f"{file.absolute()} {facts.st_size} {facts.st_mtime_ns}"


def _read_file(file: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(file) as image:
            # A folder may mix grey and colour, which only decoding every file would tell: all are read as colour.
            return np.asarray(image.convert("RGB"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read as a picture ({error}); repair or remove it") from error


def _to_array(image: Image) -> np.ndarray:
    """(H, W, 1) of a grey picture, else (H, W, 3)."""
    pixels = np.asarray(image if image.mode == "L" else image.convert("RGB"))
    return pixels if pixels.ndim == 3 else pixels[..., None]

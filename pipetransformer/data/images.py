"""Image classification: what a user writes about built-in, local and hub pictures."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipetransformer.data.base import CLASSIFICATION, Data, DatasetSpec, ImageFormat, TextFormat
from pipetransformer.data.idx import IDX_FOLDER, find_files, packaged_folder, read_idx
from pipetransformer.data.image_split import ImageSplit
from pipetransformer.data.pictures import (
    IMAGE_FOLDER,
    Pictures,
    PictureSet,
    folder_classes,
    from_arrays,
    from_folder,
    from_hub,
)
from pipetransformer.data.subset import choose, hold_out

DIGITS_TEST_FRACTION = 0.2


@dataclass(frozen=True, kw_only=True)
class ImageDataset(DatasetSpec):
    """Labelled pictures.

    Attributes:
        validation_fraction: Above 0, evaluate on this share of the training data, split off by class with a fixed
            seed, *instead* of the test data, so that tuning never touches the test data.
        augment: Crop and mirror the training pictures at random, anew in each epoch.
    """

    validation_fraction: float = 0.0
    augment: bool = False

    def check(self) -> None:
        super().check()
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"dataset.validation_fraction={self.validation_fraction} is not a share of the training data; "
                "give 0 to evaluate on the test data, or a number between 0 and 1"
            )

    @abstractmethod
    def read(self) -> PictureSet:
        """Finds the pictures, without converting any."""

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, ImageFormat)
        source = self._hold_out(self.read())
        num_classes = len(source.classes)
        train = self._limit(source.train, self.max_train_samples)
        evaluation = self._limit(source.evaluation, self.max_eval_samples)
        splits = (
            ImageSplit("train", train, wanted, num_classes, self.augment),
            ImageSplit(source.evaluation_name, evaluation, wanted, num_classes),
        )
        return Data(
            train=splits[0],
            evaluation=splits[1:],
            task=CLASSIFICATION,
            num_outputs=num_classes,
            input_shape=splits[0].input_shape,
            random_transform=self.augment,
            labels=source.classes,
        )

    def _hold_out(self, source: PictureSet) -> PictureSet:
        if self.validation_fraction == 0:
            return source
        kept, held_out = hold_out(source.train.labels, self.validation_fraction, "dataset.validation_fraction")
        return PictureSet(source.train.take(kept), source.train.take(held_out), "validation", source.classes)

    def _limit(self, pictures: Pictures, at_most: int | None) -> Pictures:
        return pictures.take(choose(len(pictures), at_most))


@dataclass(frozen=True, kw_only=True)
class Digits(ImageDataset):
    """scikit-learn's 1,797 grey 8x8 digits: built in, no download. A fixed fifth is the test data."""

    libraries: ClassVar[tuple[str, ...]] = ("sklearn.datasets", "sklearn.model_selection")

    def check(self) -> None:
        super().check()
        if self.path is not None:
            raise ValueError(f"dataset.path={self.path} has no effect: digits are built in; set dataset.path=null")

    def read(self) -> PictureSet:
        from sklearn.datasets import load_digits

        images, labels = map(np.asarray, load_digits(return_X_y=True))
        grey = np.round(images * (255 / 16)).astype(np.uint8)  # the values are 0 to 16
        pictures = from_arrays(grey.reshape(-1, 8, 8), labels)
        train, test = hold_out(pictures.labels, DIGITS_TEST_FRACTION, "the test share")
        return PictureSet(pictures.take(train), pictures.take(test), "test", _numbers(10))


@dataclass(frozen=True, kw_only=True)
class IdxImages(ImageDataset):
    """Grey pictures in MNIST's four IDX files; without a path Fashion-MNIST.

    Fashion-MNIST comes from Debian's package dataset-fashion-mnist where that is installed, else from the hub.

    Attributes:
        hub_name: Where the hub has the data.
        num_classes: Classes of the data in ``path``.
    """

    hub_name: str = "zalando-datasets/fashion_mnist"
    num_classes: int = 10

    @property
    def _published(self) -> str:
        return self.hub_name

    def check(self) -> None:
        super().check()
        if self.path is not None:
            find_files(Path(self.path))

    def read(self) -> PictureSet:
        folder = Path(self.path) if self.path is not None else packaged_folder()
        if folder is None:
            source = from_hub(self.hub_name, "train", "test", ("image", "label"), IDX_FOLDER)
            return PictureSet(source.train.in_memory(), source.evaluation.in_memory(), "test", source.classes)
        images, labels, test_images, test_labels = map(read_idx, find_files(folder))
        train, test = _idx_pictures(folder, images, labels), _idx_pictures(folder, test_images, test_labels)
        return PictureSet(train, test, "test", _numbers(self.num_classes))


@dataclass(frozen=True, kw_only=True)
class HubImages(ImageDataset):
    """Natural pictures from the hub, or from an image folder.

    Attributes:
        hub_name: Name on the hub; ``None`` when the data is always local.
        eval_split: The hub's split to evaluate on.
        image_column: The hub's column with the picture.
        label_column: The hub's column with the class.
        in_memory: Decode every picture once and keep it, for small data; else pictures are decoded when read.
    """

    hub_name: str | None = None
    eval_split: str = "test"
    image_column: str = "image"
    label_column: str = "label"
    in_memory: bool = False

    @property
    def _published(self) -> str:
        return self.hub_name or ""

    def check(self) -> None:
        super().check()
        if self.path is None and self.hub_name is None:
            raise ValueError(f"dataset.path= is missing; give {IMAGE_FOLDER}")
        if self.path is not None:
            folder_classes(Path(self.path))

    def read(self) -> PictureSet:
        if self.path is not None:
            return from_folder(Path(self.path))
        assert self.hub_name is not None
        columns = (self.image_column, self.label_column)
        return from_hub(self.hub_name, "train", self.eval_split, columns, IMAGE_FOLDER)

    def _limit(self, pictures: Pictures, at_most: int | None) -> Pictures:
        limited = super()._limit(pictures, at_most)
        return limited.in_memory() if self.in_memory else limited


def _idx_pictures(folder: Path, images: np.ndarray, labels: np.ndarray) -> Pictures:
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(f"in {folder}, images of shape {images.shape} do not go with labels of shape {labels.shape}")
    return from_arrays(images, labels)


def _numbers(num_classes: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(num_classes))

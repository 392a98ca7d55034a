"""Image classification: specifications of built-in, local and hub images."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipetransformer.data.base import SPLIT_SEED, Data, ImageFormat, TextFormat, subsample
from pipetransformer.data.hub import find_on_hub
from pipetransformer.data.images.folders import IMAGE_FOLDER, folder_classes, from_folder
from pipetransformer.data.images.sources import (
    IDX_FOLDER,
    ImageSource,
    ImageSplits,
    find_files,
    from_arrays,
    from_hub,
    packaged_folder,
    read_idx,
    refuse_damaged,
)
from pipetransformer.data.images.spec import PictureSpec
from pipetransformer.data.images.split import check_labels
from pipetransformer.data.tasks import image_classification
from pipetransformer.errors import UserError

NUM_DIGITS, DIGITS_TEST_FRACTION = 1797, 0.2
CLOTHES = (  # as the hub names them
    "T - shirt / top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ImageDataset(PictureSpec):
    """Labelled images.

    Attributes:
        validation_fraction: Above 0, evaluate on this fraction of the training data, split off by class with a fixed
            seed, *instead* of the test data, so that tuning never touches the test data.
        label_smoothing: From 0 to below 1; see :class:`torch.nn.CrossEntropyLoss`.
    """

    validation_fraction: float = 0.0
    label_smoothing: float = 0.0

    def check(self) -> None:
        super().check()
        if not 0 <= self.validation_fraction < 1:
            raise UserError(
                f"dataset.validation_fraction={self.validation_fraction} is not a fraction of the training data; "
                "give 0 to evaluate on the test data, or a number between 0 and 1"
            )
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"dataset.label_smoothing={self.label_smoothing} must be 0 or more and below 1")

    @abstractmethod
    def read(self) -> ImageSplits:
        """Finds the images, without converting any."""

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, ImageFormat)
        source = self.read()
        check_classes(source.classes)
        # decided once, over all images: splits and limits make no difference
        num_channels = wanted.num_channels or max(source.train.num_channels, source.evaluation.num_channels)
        wanted = replace(wanted, num_channels=num_channels)
        source = self._hold_out(source)
        task = image_classification(len(source.classes), source.classes, self.label_smoothing)
        train = self._limit(source.train, self.max_train_samples)
        evaluation = self._limit(source.evaluation, self.max_eval_samples)
        data = self._data(train, evaluation, source.evaluation_name, task, wanted)
        return replace(data, warnings=(*data.warnings, *source.warnings))

    def _num_train(self, available: int) -> int:
        return super()._num_train(available - math.ceil(self.validation_fraction * available))

    def _check_splits(self, source: ImageSplits) -> int:
        """Checks classes, labels and images that the run will read, and returns the number of training samples."""
        check_classes(source.classes)
        train = subsample(len(source.train), None if self.validation_fraction else self.max_train_samples)
        splits = {"train": source.train.take(train)}
        if not self.validation_fraction:
            evaluation = subsample(len(source.evaluation), self.max_eval_samples)
            splits[source.evaluation_name] = source.evaluation.take(evaluation)
        for name, split in splits.items():
            if len(split) == 0:
                other = (
                    ", or evaluate on a part of train/ by dataset.validation_fraction=0.1" if name != "train" else ""
                )
                raise UserError(f"the {name} split has no pictures with a class; check dataset.path{other}")
            check_labels(name, split.labels, len(source.classes))
        refuse_damaged(splits.values())
        return self._num_train(len(source.train))

    def _hold_out(self, source: ImageSplits) -> ImageSplits:
        if self.validation_fraction == 0:
            return source
        option = "dataset.validation_fraction"
        kept, held_out = hold_out(source.train.labels, self.validation_fraction, option, source.classes)
        splits = source.train.take(kept), source.train.take(held_out)
        return replace(source, train=splits[0], evaluation=splits[1], evaluation_name="validation")

    def _limit(self, source: ImageSource, at_most: int | None) -> ImageSource:
        return source.take(subsample(len(source), at_most))


@dataclass(frozen=True, kw_only=True)
class Digits(ImageDataset):
    """scikit-learn's 1,797 grey 8x8 digits: built in, no download. A fixed fifth is the test data."""

    libraries: ClassVar[tuple[str, ...]] = ("sklearn.datasets", "sklearn.model_selection")

    def check(self) -> None:
        super().check()
        if self.path is not None:
            raise UserError(f"dataset.path={self.path} has no effect: digits are built in; set dataset.path=null")

    def preflight(self) -> int | None:
        return self._num_train(NUM_DIGITS - math.ceil(DIGITS_TEST_FRACTION * NUM_DIGITS))

    def read(self) -> ImageSplits:
        from sklearn.datasets import load_digits

        images, labels = map(np.asarray, load_digits(return_X_y=True))
        assert len(images) == NUM_DIGITS
        grey = np.round(images * (255 / 16)).astype(np.uint8)  # the values are 0 to 16
        pictures = from_arrays(grey.reshape(-1, 8, 8), labels)
        classes = _numbers(10)
        train, test = hold_out(pictures.labels, DIGITS_TEST_FRACTION, "the test share", classes)
        return ImageSplits(pictures.take(train), pictures.take(test), "test", classes)


@dataclass(frozen=True, kw_only=True)
class IdxImages(ImageDataset):
    """Grey images in MNIST's four IDX files; without a path Fashion-MNIST.

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
        check_classes(_numbers(self.num_classes))
        if self.path is not None:
            find_files(Path(self.path))

    def preflight(self) -> int | None:
        if self._folder is None:
            find_on_hub(self.hub_name, IDX_FOLDER)
            return None
        return self._check_splits(self.read())

    @property
    def _folder(self) -> Path | None:
        """The local data: those at the path, or of Debian's package where nothing else is asked for."""
        if self.path is not None:
            return Path(self.path)
        return packaged_folder() if self.hub_name == type(self).hub_name else None

    def read(self) -> ImageSplits:
        folder = self._folder
        if folder is None:
            source = from_hub(self.hub_name, "train", "test", ("image", "label"), IDX_FOLDER)
            return ImageSplits(source.train.in_memory(), source.evaluation.in_memory(), "test", source.classes)
        images, labels, test_images, test_labels = map(read_idx, find_files(folder))
        train, test = _idx_pictures(folder, images, labels), _idx_pictures(folder, test_images, test_labels)
        return ImageSplits(train, test, "test", CLOTHES if self.path is None else _numbers(self.num_classes))


@dataclass(frozen=True, kw_only=True)
class HubImages(ImageDataset):
    """Natural images from the hub, or from an image folder.

    Attributes:
        hub_name: Name on the hub; ``None`` when the data is always local.
        eval_split: The hub's split or the folder to evaluate on, where ``val`` and ``validation`` are the same folder;
            ``None``: the hub's ``test``, or the first folder of ``test``, ``val`` and ``validation``.
        image_column: The hub's column with the picture.
        label_column: The hub's column with the class.
        in_memory: Decode every picture once and keep it, for small data; else pictures are decoded when read.
    """

    hub_name: str | None = None
    eval_split: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    in_memory: bool = False

    @property
    def _published(self) -> str:
        return self.hub_name or ""

    def check(self) -> None:
        super().check()
        if self.path is None and self.hub_name is None:
            raise UserError(f"dataset.path= is missing; give {IMAGE_FOLDER}")
        if self.eval_split == "train":
            raise UserError("dataset.eval_split=train would evaluate on the training data; name another split")
        if self.path is not None:
            check_classes(folder_classes(Path(self.path), self.eval_split, self.validation_fraction > 0).classes)

    def preflight(self) -> int | None:
        if self.path is None:
            assert self.hub_name is not None
            find_on_hub(self.hub_name, IMAGE_FOLDER)
            return None
        return self._check_splits(self.read())

    def read(self) -> ImageSplits:
        if self.path is not None:
            return from_folder(Path(self.path), self.eval_split, self.validation_fraction > 0)
        assert self.hub_name is not None
        columns = (self.image_column, self.label_column)
        return from_hub(self.hub_name, "train", self.eval_split or "test", columns, IMAGE_FOLDER)

    def _limit(self, source: ImageSource, at_most: int | None) -> ImageSource:
        limited = super()._limit(source, at_most)
        return limited.in_memory() if self.in_memory else limited


def _idx_pictures(folder: Path, images: np.ndarray, labels: np.ndarray) -> ImageSource:
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise UserError(f"in {folder}, images of shape {images.shape} do not go with labels of shape {labels.shape}")
    return from_arrays(images, labels)


def _numbers(num_classes: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(num_classes))


def check_classes(classes: tuple[str, ...]) -> None:
    """Raises UserError where there is nothing to tell apart."""
    if len(classes) < 2:
        found = f"one class, {classes[0]}" if classes else "no class"
        raise UserError(
            f"the data has {found}, and classification needs 2 or more; give a folder for each class below train/, or "
            "for data in IDX files dataset.num_classes="
        )


def hold_out(
    labels: np.ndarray, fraction: float, option: str, classes: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Splits off a stratified share.

    Args:
        labels: Class of each sample, shape (N,).
        fraction: Share of the samples to hold out, between 0 and 1.
        option: What the user would change, for the message.
        classes: Their names, for the message.

    Returns:
        Ids that stay and ids held out, each ascending.

    Raises:
        UserError: The share leaves some class without a sample on either side.
    """
    from sklearn.model_selection import train_test_split

    if single := np.flatnonzero(np.bincount(labels) == 1).tolist():
        others = f", as have {len(single) - 1} others" * (len(single) > 1)
        raise UserError(
            f"{option}={fraction} takes a part of each class, and {classes[single[0]]} has 1 picture{others}; give it "
            "another one, or evaluate on a folder of its own"
        )
    try:
        kept, held_out = train_test_split(
            np.arange(len(labels)), test_size=fraction, stratify=labels, random_state=SPLIT_SEED
        )
    except ValueError as error:
        raise UserError(
            f"{option}={fraction} cannot be split off {len(labels)} samples by class: {error}; choose another one"
        ) from error
    return np.sort(kept), np.sort(held_out)

"""Pictures as a model wants them: size, channels, normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipetransformer.data.augment import AUGMENT_SEED, crop_and_flip
from pipetransformer.data.base import ImageFormat, Split
from pipetransformer.data.digest import Digest
from pipetransformer.data.metrics import compute
from pipetransformer.data.pictures import Pictures

if TYPE_CHECKING:
    from torch import Tensor

# Part of every split's identity. Change them with what inputs() computes, or features of the old pictures are reused.
TRANSFORM = "shorter side resized bilinearly with antialiasing, middle cropped"
AUGMENTATION = f"crop and flip with seed {AUGMENT_SEED}"


class ImageSplit(Split):
    """One split of labelled pictures.

    Args:
        name: Name of the split.
        pictures: The pictures and their labels.
        wanted: Size, channels and normalisation of the model.
        num_classes: Labels are 0 to ``num_classes - 1``.
        augment: Crop and mirror at random, anew in each epoch.

    Raises:
        ValueError: No pictures, a label out of range, or channels that cannot be converted.
    """

    def __init__(
        self, name: str, pictures: Pictures, wanted: ImageFormat, num_classes: int, augment: bool = False
    ) -> None:
        if len(pictures) == 0:
            raise ValueError(f"the {name} split has no pictures; check dataset.path")
        check_labels(name, pictures.labels, num_classes)
        self.name = name
        self.pictures = pictures
        self.num_classes = num_classes
        self.augment = augment
        self._epoch = 0
        self._size = wanted.size
        self.input_shape = _input_shape(pictures.decode(np.array([0]))[0].shape, wanted)
        self._mean, self._std = (_per_channel(values, self.input_shape[0]) for values in (wanted.mean, wanted.std))

    def __len__(self) -> int:
        return len(self.pictures)

    def identity(self) -> str:
        digest = Digest("images")
        digest.add(self.pictures.identity(), TRANSFORM, self.input_shape, self._size)
        digest.add(self._mean.numpy(), self._std.numpy())
        digest.add(*(AUGMENTATION, self._epoch) if self.augment else (None, None))
        return digest.hex()

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def inputs(self, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        images = self._read(ids)  # (B, C, H, W) in [0, 1]
        if self.augment:
            images = crop_and_flip(images, self._epoch, ids)
        return (images - self._mean) / self._std

    def targets(self, ids: Sequence[int]) -> Tensor:
        import torch

        return torch.from_numpy(self.pictures.labels[np.asarray(ids)])

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        return compute(("accuracy",), predictions, self.pictures.labels, self.num_classes)

    def _read(self, ids: Sequence[int]) -> Tensor:
        import torch

        batches = _stacked(self.pictures.decode(np.asarray(ids)))
        images = [torch.from_numpy(batch).permute(0, 3, 1, 2).contiguous() for batch in batches]
        return torch.cat([self._convert(batch) for batch in images])

    def _convert(self, pixels: Tensor) -> Tensor:
        """(B, C', H', W') of uint8 to (B, C, H, W) in [0, 1]."""
        num_channels, height, width = self.input_shape
        if self._size is None and pixels.shape[2:] != (height, width):
            raise ValueError(
                f"a picture of {pixels.shape[2]}x{pixels.shape[3]} pixels in the {self.name} split does not fit the "
                f"others of {height}x{width}; have them resized with model.image_size="
            )
        images = pixels.float() / 255
        images = images if self._size is None else _fit(images, self._size)
        if num_channels == 1:
            return images.mean(1, keepdim=True)
        return images.expand(-1, num_channels, -1, -1)


def _stacked(pictures: Sequence[np.ndarray] | np.ndarray) -> list[np.ndarray]:
    """Arrays (B, H, W, C) of as many pictures as have the same shape."""
    if isinstance(pictures, np.ndarray):
        return [pictures]
    same_shape = len({picture.shape for picture in pictures}) == 1
    batches = [pictures] if same_shape else [[picture] for picture in pictures]
    return [np.stack(batch) for batch in batches]


def check_labels(name: str, labels: np.ndarray, num_classes: int) -> None:
    """Raises ValueError unless all labels lie in 0 to ``num_classes - 1``."""
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        raise ValueError(
            f"{len(wrong)} labels of the {name} split lie outside 0..{num_classes - 1}, the first is {wrong[0]}; "
            "correct the labels, or for data in IDX files dataset.num_classes="
        )


def _input_shape(picture_shape: tuple[int, ...], wanted: ImageFormat) -> tuple[int, int, int]:
    height, width, num_channels = picture_shape
    target = wanted.num_channels or num_channels
    if target != num_channels and {target, num_channels} != {1, 3}:
        raise ValueError(
            f"the pictures have {num_channels} channels and the model wants {target}; only 1 and 3 convert into each "
            "other, so choose another model or leave model.num_channels=null"
        )
    return (target, height, width) if wanted.size is None else (target, wanted.size, wanted.size)


def _per_channel(values: tuple[float, ...], num_channels: int) -> Tensor:
    """Shape (C, 1, 1); one value stands for all channels."""
    import torch

    if len(values) not in (1, num_channels):
        raise ValueError(
            f"the normalisation has {len(values)} values for {num_channels} channels; give 1 or {num_channels}"
        )
    return torch.tensor(values).expand(num_channels)[:, None, None]


def _fit(images: Tensor, size: int) -> Tensor:
    """Resizes the shorter side to ``size`` and crops the middle, as is usual for natural pictures."""
    from torch.nn.functional import interpolate

    height, width = images.shape[2:]
    if (height, width) != (size, size):
        scale = size / min(height, width)
        target = (max(size, round(height * scale)), max(size, round(width * scale)))
        images = interpolate(images, target, mode="bilinear", align_corners=False, antialias=True)
    top, left = (images.shape[2] - size) // 2, (images.shape[3] - size) // 2
    return images[:, :, top : top + size, left : left + size]

"""ImageSource as a model wants them: size, channels, normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipetransformer.data.base import NUM_PROBED, Digest, ImageFormat, Split, evenly_spaced
from pipetransformer.data.images.flip_pair import FlipPair
from pipetransformer.data.images.sources import ImageSource
from pipetransformer.data.images.transforms import ImageTransforms
from pipetransformer.data.tasks import Task
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

AUGMENT_SEED = 0
# Part of every split's identity. Change them with what inputs() computes, or features of the old pictures are reused.
TRANSFORM = "shorter side resized bilinearly by Pillow, middle cropped, rounded as torchvision does"
AUGMENTATION = f"crop and flip with seed {AUGMENT_SEED}"


class ImageSplit(Split):
    """One split of labelled images.

    Args:
        name: Name of the split.
        source: The images and their labels.
        wanted: Size, channels and normalisation of the model. Without channels it takes those of the source.
        task: The task that the labels are for.
        augment: Crop and mirror at random, anew in each epoch.
        transforms: Of the libraries, beside that.

    Attributes:
        input_shape: (C, H, W) of what :meth:`inputs` returns.

    Raises:
        UserError: No images, a label out of range, or channels that cannot be converted.
    """

    def __init__(
        self, name: str, source: ImageSource, wanted: ImageFormat, task: Task, augment: bool = False,
        transforms: ImageTransforms | None = None,
    ) -> None:  # fmt: skip
        if len(source) == 0:
            raise UserError(f"the {name} split has no pictures; check dataset.path")
        if task.name == "classification":
            check_labels(name, source.labels, task.head.num_outputs)
        self.name = name
        self.source = source
        self.task = task
        self.augment = augment
        self._size = wanted.size
        self._transforms = transforms or ImageTransforms((), wanted.size)
        if self._transforms.mirrors_alone and not augment:
            self.flip_pair = self._flip_pair()
        self.read_ahead = ("inputs",)  # a label lies in memory
        self.is_slow = source.stamp is not None or augment or bool(self._transforms.specs) or self._resizes()
        self.reading = f"augment={augment}, transforms={self._transforms.identity()}"
        self.input_shape = _input_shape(self._pictures([0], 0)[0], wanted.num_channels or source.num_channels)
        self._mean, self._std = (_per_channel(values, self.input_shape[0]) for values in (wanted.mean, wanted.std))

    def __len__(self) -> int:
        return len(self.source)

    def _resizes(self) -> bool:
        """Returns whether the first picture has another size than the model's."""
        return self._size is not None and self.source.decode(np.array([0]))[0].shape[:2] != (self._size, self._size)

    def identity(self) -> str:
        return self._identity(self.source.identity())

    def quick_identity(self) -> str:
        """Returns a digest of few pictures where they lie in files; these may have moved since, or be copies."""
        if self.source.stamp is None:
            return self.identity()
        few = Digest("few pictures")
        few.add(len(self), *self.source.decode(np.array(evenly_spaced(len(self), NUM_PROBED))))
        return self._identity(few.hex())

    def _identity(self, pictures: str) -> str:
        digest = Digest("images")
        digest.add(pictures, TRANSFORM, self.input_shape, self._size)
        digest.add(self._mean.numpy(), self._std.numpy())
        digest.add(AUGMENTATION if self.augment else None)
        if (transforms := self._transforms.identity()) is not None:
            digest.add(transforms)
        return digest.hex()

    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        images = self._read(ids, epoch)  # (B, C, H, W) in [0, 1]
        if self.augment:
            images = crop_and_flip(images, epoch, ids)
        return self._transforms.erase(self._normalised(images), epoch, ids)

    def _normalised(self, images: Tensor) -> Tensor:
        return (images - self._mean).div_(self._std)

    def _flip_pair(self) -> FlipPair:
        pair = {mirrored: self._transforms.always(mirrored) for mirrored in (False, True)}

        def inputs(ids: Sequence[int], mirrored: bool) -> Tensor:
            return self._normalised(self._read(ids, 0, pair[mirrored]))

        return FlipPair(lambda ids, epoch: self._transforms.mirrored(ids.tolist(), epoch), inputs)

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        import torch

        return torch.from_numpy(self.source.labels[np.asarray(ids)])

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        return self.task.predict(outputs)

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        return self.task.score(predictions, self.source.labels)

    def _pictures(
        self, ids: Sequence[int], epoch: int, transforms: ImageTransforms | None = None
    ) -> Sequence[np.ndarray] | np.ndarray:
        """Decodes, transforms and resizes pictures, each (H, W, C') of uint8."""
        pictures = (transforms or self._transforms).pictures(self.source.decode(np.asarray(ids)), epoch, ids)
        return pictures if self._size is None else [_fit(picture, self._size) for picture in pictures]

    def _read(self, ids: Sequence[int], epoch: int, transforms: ImageTransforms | None = None) -> Tensor:
        import torch

        batches = _stacked(self._pictures(ids, epoch, transforms))
        images = [torch.from_numpy(batch).permute(0, 3, 1, 2).contiguous() for batch in batches]
        converted = [self._convert(batch) for batch in images]
        return converted[0] if len(converted) == 1 else torch.cat(converted)

    def _convert(self, pixels: Tensor) -> Tensor:
        """Converts (B, C', H, W) of uint8 to (B, C, H, W) in [0, 1]."""
        num_channels, height, width = self.input_shape
        if pixels.shape[2:] != (height, width):
            raise UserError(
                f"a picture of {pixels.shape[2]}x{pixels.shape[3]} pixels in the {self.name} split does not fit the "
                f"others of {height}x{width}; have them resized with model.image_size="
            )
        images = pixels.float().div_(255)
        if num_channels == 1:
            return images.mean(1, keepdim=True)
        return images.expand(-1, num_channels, -1, -1)


def _stacked(pictures: Sequence[np.ndarray] | np.ndarray) -> list[np.ndarray]:
    """Returns one array (B, H, W, C) where all images have the same shape, else one for each."""
    if isinstance(pictures, np.ndarray):
        return [pictures]
    same_shape = len({picture.shape for picture in pictures}) == 1
    batches = [pictures] if same_shape else [[picture] for picture in pictures]
    return [np.stack(batch) for batch in batches]


def check_labels(name: str, labels: np.ndarray, num_classes: int) -> None:
    """Raises UserError unless all labels lie in 0 to ``num_classes - 1``."""
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        raise UserError(
            f"{len(wrong)} labels of the {name} split lie outside 0..{num_classes - 1}, the first is {wrong[0]}; "
            "correct the labels, or for data in IDX files dataset.num_classes="
        )


def _input_shape(picture: np.ndarray, num_channels: int) -> tuple[int, int, int]:
    """Returns (C, H, W) from a picture (H, W, C') in the model's size, and the channels that the model reads."""
    height, width, found = picture.shape
    if num_channels != found and {num_channels, found} != {1, 3}:
        raise UserError(
            f"the pictures have {found} channels and the model wants {num_channels}; only 1 and 3 convert into each "
            "other, so choose another model or leave model.num_channels=null"
        )
    return (num_channels, height, width)


def _per_channel(values: tuple[float, ...], num_channels: int) -> Tensor:
    """Returns (C, 1, 1); one value stands for all channels."""
    import torch

    if len(values) not in (1, num_channels):
        raise UserError(
            f"the normalisation has {len(values)} values for {num_channels} channels; give 1 or {num_channels}"
        )
    return torch.tensor(values).expand(num_channels)[:, None, None]


def _fit(picture: np.ndarray, size: int) -> np.ndarray:
    """Resizes the shorter side to ``size`` and crops the middle, pixel by pixel as timm's transform for evaluation.

    Args:
        picture: Shape (H, W, C) of uint8, with 1 or 3 channels.
        size: Side length in pixels.

    Returns:
        Shape (size, size, C) of uint8.
    """
    from PIL import Image
    from torchvision.transforms import CenterCrop, Resize

    if picture.shape[:2] == (size, size):
        return picture
    image = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
    return np.asarray(CenterCrop(size)(Resize(size)(image))).reshape(size, size, -1)


def crop_and_flip(images: Tensor, epoch: int, ids: Sequence[int]) -> Tensor:
    """Shifts each image by up to an eighth of its side, filling with black, and mirrors every other one.

    The draw depends on the epoch and the sample alone, never on the rank that makes it.

    Args:
        images: Shape (B, C, H, W), in [0, 1].
        epoch: The epoch that the draw belongs to.
        ids: Sample ids, length B.

    Returns:
        Shape (B, C, H, W).
    """
    import torch
    from torch.nn.functional import pad

    _, num_channels, height, width = images.shape
    margin = max(1, min(height, width) // 8)
    draws = torch.from_numpy(np.stack([_draw(epoch, sample, margin) for sample in ids]))  # (B, 3)
    top, left, mirror = draws[:, :, None].unbind(1)  # each (B, 1)
    rows = top + torch.arange(height)  # (B, H)
    columns = left + torch.where(mirror == 1, torch.arange(width).flip(0), torch.arange(width))  # (B, W)
    padded = pad(images, [margin] * 4)
    batch = torch.arange(len(ids))[:, None, None, None]
    channels = torch.arange(num_channels)[:, None, None]
    return padded[batch, channels, rows[:, None, :, None], columns[:, None, None, :]]


def _draw(epoch: int, sample: int, margin: int) -> np.ndarray:
    """Draws offsets from the top and the left, each within 0..2 margin, and 1 to mirror."""
    generator = np.random.default_rng([AUGMENT_SEED, epoch, int(sample)])
    return generator.integers(0, [2 * margin + 1, 2 * margin + 1, 2])

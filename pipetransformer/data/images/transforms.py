"""Transforms of pictures by the names and arguments that torchvision and timm give them.

An entry of ``dataset.transforms`` is a name, or a mapping of ``name`` and arguments::

    [RandomHorizontalFlip, {name: RandAugment, num_ops: 2}, timm.rand-m9-mstd0.5-inc1, {name: RandomErasing, p: 0.25}]

A plain name is a class of ``torchvision.transforms.v2``; one that begins with ``timm.`` is a class or a policy of timm.
Each picture goes through them in this order::

    decoded (uint8, RGB) -> transforms in their order -> the model's size -> normalised -> erasing

Erasing comes last, and on normalised pixels, as in both libraries' recipes: its zeros are the mean of the data.
Only :data:`FIXED` ones apply to evaluation too, since they draw nothing; all others draw by (epoch, sample), so that a
picture is the same on every rank, in every batch and after a restart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import metadata
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

FIXED = ("CenterCrop", "Grayscale", "Pad", "RGB", "Resize")
DRAWN = (
    "AugMix", "AutoAugment", "ColorJitter", "ElasticTransform", "GaussianBlur", "RandAugment", "RandomAdjustSharpness",
    "RandomAffine", "RandomAutocontrast", "RandomChannelPermutation", "RandomCrop", "RandomEqualize", "RandomGrayscale",
    "RandomHorizontalFlip", "RandomInvert", "RandomPerspective", "RandomPhotometricDistort", "RandomPosterize",
    "RandomResize", "RandomResizedCrop", "RandomRotation", "RandomShortestSize", "RandomSolarize", "RandomVerticalFlip",
    "RandomZoomOut", "ScaleJitter", "TrivialAugmentWide", "timm.RandomResizedCropAndInterpolation",
)  # fmt: skip
ERASING = ("RandomErasing", "timm.RandomErasing")
NAMES = (*FIXED, *DRAWN, *ERASING)
FLIP = "RandomHorizontalFlip"
TIMM = "timm."
TIMM_POLICY = re.compile(
    r"timm\.(rand|augmix|v0|v0r|original|originalr|3a)(-((m|n|p|w|d|a|b|mstd|mmax|inc)\d[\d.]*|t[\w]+))*"
)
POLICIES = "timm.rand-m9-mstd0.5-inc1, timm.augmix-m3-w3 or timm.original-mstd0.5"
ON_PICTURE, ON_TENSOR = 0, 1  # part of the key of a draw


@dataclass(frozen=True)
class TransformSpec:
    """One entry of the option, by its name and arguments.

    Attributes:
        option: The entry as the user finds it, ``dataset.transforms[0]``.
    """

    option: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_random(self) -> bool:
        """Returns whether it draws anew for each sample and epoch."""
        return self.name not in FIXED

    @property
    def erases(self) -> bool:
        """Returns whether it works on normalised pixels, after all others."""
        return self.name in ERASING


def parse_transforms(entries: Sequence[Any]) -> tuple[TransformSpec, ...]:
    """Reads the entries of ``dataset.transforms``, without torch; arguments are looked at where they are built.

    Raises:
        UserError: An entry is neither a name nor a mapping, no library has the name, or one follows an erasing.
    """
    specs = tuple(_parse(f"dataset.transforms[{index}]", entry) for index, entry in enumerate(entries))
    for before, after in pairwise(specs):
        if before.erases and not after.erases:
            raise UserError(
                f"{after.option}={after.name} stands after {before.name}, which erases normalised pixels and comes "
                "last; move it to the end"
            )
    return specs


def _parse(option: str, entry: Any) -> TransformSpec:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise UserError(
            f"{option}={entry!r} is no transform; give a name as RandomHorizontalFlip, or a mapping as "
            "{name: RandAugment, num_ops: 2}"
        )
    spec = TransformSpec(option, entry["name"], {str(key): entry[key] for key in entry if key != "name"})
    if spec.name not in NAMES and not TIMM_POLICY.fullmatch(spec.name):
        near = get_close_matches(spec.name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(NAMES)}, or a policy as {POLICIES}"
        raise UserError(f"{option}={spec.name} is a transform neither of torchvision nor of timm; {hint}")
    if TIMM_POLICY.fullmatch(spec.name) and spec.arguments:
        raise UserError(
            f"{option}={spec.name} takes no arguments, they are in its name; leave out {', '.join(spec.arguments)}"
        )
    return spec


def mirrors_alone(specs: Iterable[TransformSpec]) -> bool:
    """Returns whether the only draw is whether a picture is mirrored from left to right."""
    return [spec.name for spec in specs if spec.is_random] == [FLIP]


class ImageTransforms:
    """The transforms of a training split, built once.

    Args:
        specs: In their order.
        size: Side of the model's pictures in pixels, which a transform without ``size`` takes; ``None``: unknown.
        mean: Of the model's normalisation, with which timm's policies fill.
        seed: First part of the key of each draw.

    Raises:
        UserError: An argument is unknown, missing or wrong.
    """

    def __init__(
        self, specs: Iterable[TransformSpec], size: int | None, mean: tuple[float, ...] = (0.5,), seed: int = 0
    ) -> None:
        self.specs, self._size, self._mean, self._seed = tuple(specs), size, mean, seed
        self._on_picture = [(spec, self._build(spec)) for spec in self.specs if not spec.erases]
        self._on_tensor = [(spec, self._build(spec)) for spec in self.specs if spec.erases]

    def fixed(self) -> ImageTransforms:
        """Returns those that draw nothing, for evaluation."""
        return ImageTransforms((spec for spec in self.specs if not spec.is_random), self._size, self._mean, self._seed)

    @property
    def mirrors_alone(self) -> bool:
        """True where the only draw is whether a picture is mirrored from left to right."""
        return mirrors_alone(self.specs)

    def always(self, mirrored: bool) -> ImageTransforms:
        """Returns these transforms with every picture mirrored, or none, in place of the draw."""
        specs = (replace(one, arguments={"p": float(mirrored)}) if one.name == FLIP else one for one in self.specs)
        return ImageTransforms(specs, self._size, self._mean, self._seed)

    def mirrored(self, ids: Sequence[int], epoch: int) -> np.ndarray:
        """Returns which samples an epoch mirrors, bool (B,), by the draws of :meth:`pictures`."""
        from PIL import Image

        from pipetransformer.data.images.library_rng import kept_generators, seed_generators

        (flip,) = (transform for spec, transform in self._on_picture if spec.name == FLIP)
        marker, found = Image.fromarray(np.array([[0, 1]], dtype=np.uint8)), np.zeros(len(ids), dtype=bool)
        with kept_generators():
            for index, sample in enumerate(ids):
                seed_generators(self._seed, epoch, int(sample), ON_PICTURE)  # what is fixed draws nothing before
                found[index] = np.asarray(flip(marker))[0, 0] == 1
        return found

    def identity(self) -> str | None:
        """Returns all that determines what they make of a picture in an epoch; ``None`` where there are none."""
        if not self.specs:
            return None
        versions = [f"{name} {metadata.version(name)}" for name in ("torchvision", "timm", "pillow")]
        specs = [(spec.name, sorted(spec.arguments.items())) for spec in self.specs]
        return f"{specs} {self._seed} {self._size} {self._mean} {versions}"

    def pictures(
        self, pictures: Sequence[np.ndarray] | np.ndarray, epoch: int, ids: Sequence[int]
    ) -> Sequence[np.ndarray] | np.ndarray:
        """Transforms decoded pictures, each (H, W, 1 or 3) of uint8; their sizes may change."""
        if not self._on_picture:
            return pictures
        from PIL import Image

        from pipetransformer.data.images.library_rng import kept_generators, seed_generators

        made = []
        with kept_generators():
            for picture, sample in zip(pictures, ids, strict=True):
                seed_generators(self._seed, epoch, int(sample), ON_PICTURE)
                rgb = picture if picture.shape[2] == 3 else np.repeat(picture, 3, axis=2)
                made.append(_as_array(_apply(self._on_picture, Image.fromarray(rgb), int(sample))))
        return made

    def erase(self, images: Tensor, epoch: int, ids: Sequence[int]) -> Tensor:
        """Erases parts of normalised images (B, C, H, W), which may change in place."""
        if not self._on_tensor:
            return images
        import torch

        from pipetransformer.data.images.library_rng import kept_generators, seed_generators

        made = []
        with kept_generators():
            for image, sample in zip(images, ids, strict=True):
                seed_generators(self._seed, epoch, int(sample), ON_TENSOR)
                made.append(_apply(self._on_tensor, image, int(sample)))
        return torch.stack(made)

    def _build(self, spec: TransformSpec) -> Callable[[Any], Any]:
        try:
            if TIMM_POLICY.fullmatch(spec.name):
                return self._policy(spec.name.removeprefix(TIMM))
            return self._instance(spec)
        except UserError:
            raise
        except Exception as error:  # a library's own check of an argument, an assertion among them
            raise UserError(f"{spec.option}: {spec.name} cannot be made ({_words(error)})") from error

    def _instance(self, spec: TransformSpec) -> Callable[[Any], Any]:
        from inspect import Parameter, signature

        make, arguments = _class_of(spec.name), dict(spec.arguments)
        parameters = {name: each for name, each in signature(make).parameters.items() if name != "device"}
        for name in arguments:
            if name not in parameters:
                near = get_close_matches(name, parameters, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(parameters) or 'none'}"
                raise UserError(f"{spec.option}: {spec.name} has no argument {name}; {hint}")
        required = [name for name, each in parameters.items() if each.default is Parameter.empty]
        if "size" in required and self._size is not None:
            arguments.setdefault("size", [self._size, self._size])
        if missing := [name for name in required if name not in arguments]:
            raise UserError(f"{spec.option}: {spec.name} lacks {', '.join(missing)}; give it beside the name")
        if spec.name == "timm.RandomErasing":
            arguments["device"] = "cpu"  # its pixels are drawn where it is told, by default on a GPU
        return make(**{name: _as_argument(spec.name, name, value) for name, value in arguments.items()})

    def _policy(self, name: str) -> Callable[[Any], Any]:
        """Makes a policy of timm with the sizes and colours of its ``create_transform``."""
        from timm.data import auto_augment

        size = self._size or 32
        options: dict[str, Any] = {"translate_const": int(size * 0.45)}
        mean = self._mean * 3 if len(self._mean) == 1 else self._mean
        options["img_mean"] = tuple(min(255, round(255 * value)) for value in mean[:3])
        if name.startswith("rand"):
            return auto_augment.rand_augment_transform(name, options)
        if name.startswith("augmix"):
            return auto_augment.augment_and_mix_transform(name, options | {"translate_pct": 0.3})
        return auto_augment.auto_augment_transform(name, options)


def _class_of(name: str) -> Callable[..., Any]:
    if name == "timm.RandomErasing":
        from timm.data.random_erasing import RandomErasing

        return RandomErasing
    if name.startswith(TIMM):
        from timm.data import transforms

        return getattr(transforms, name.removeprefix(TIMM))
    from torchvision.transforms import v2

    return getattr(v2, name)


def _as_argument(transform: str, name: str, value: Any) -> Any:
    """Returns torchvision's value for a word of a configuration."""
    from torchvision.transforms import v2

    words = {"interpolation": v2.InterpolationMode, "policy": v2.AutoAugmentPolicy}
    return words[name](value) if name in words and isinstance(value, str) and not transform.startswith(TIMM) else value


def _apply(transforms: Sequence[tuple[TransformSpec, Callable[[Any], Any]]], image: Any, sample: int) -> Any:
    for spec, transform in transforms:
        try:
            image = transform(image)
        except Exception as error:
            raise UserError(f"{spec.option}: {spec.name} fails on picture {sample} ({_words(error)})") from error
    return image


def _words(error: Exception) -> str:
    """Returns the message of a library in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _as_array(image: Any) -> np.ndarray:
    """Returns (H, W, 1 or 3) of uint8."""
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]

"""Options of every dataset of pictures: what is drawn and mixed in training."""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipetransformer.data.base import Data, DatasetSpec, ImageFormat, TextFormat
from pipetransformer.data.images.folders import unlabelled_files
from pipetransformer.data.images.mixing import MODES, Mixing
from pipetransformer.data.images.sources import ImageSource, refuse_damaged
from pipetransformer.data.images.split import ImageSplit
from pipetransformer.data.images.transforms import ImageTransforms, mirrors_alone, parse_transforms
from pipetransformer.data.tasks import MULTI_LABEL, Task, image_classification
from pipetransformer.data.unlabelled import ScoredSplit, Unlabelled
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head


@dataclass(frozen=True, kw_only=True)
class PictureSpec(DatasetSpec, ABC):
    """A dataset of pictures.

    Attributes:
        augment: Crop and mirror the training pictures at random, anew in each epoch.
        transforms: Transforms of torchvision and timm by their names, see
            :mod:`pipetransformer.data.images.transforms`. Those that draw apply to training alone.
        mixup, cutmix, mixup_prob, mixup_switch_prob, mixup_mode: Mixing of the training pictures of a batch as timm's
            options of these names say, see :class:`~pipetransformer.data.images.mixing.Mixing`; off where the first two
            are 0.
    """

    augment: bool = False
    transforms: list[Any] = field(default_factory=list)
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    mixup_mode: str = "batch"

    def check(self) -> None:
        super().check()
        parse_transforms(self.transforms)
        self._check_mixing()

    def _check_mixing(self) -> None:
        for option in ("mixup", "cutmix"):
            if not 0 <= getattr(self, option) < math.inf:
                raise UserError(
                    f"dataset.{option}={getattr(self, option)} is no parameter of a Beta distribution; give a number "
                    "above 0, as 0.8, or 0 to leave it off"
                )
        for option in ("mixup_prob", "mixup_switch_prob"):
            if not 0 <= getattr(self, option) <= 1:
                raise UserError(f"dataset.{option}={getattr(self, option)} is no probability; give 0 to 1")
        if self.mixup_mode not in MODES:
            raise UserError(f"dataset.mixup_mode={self.mixup_mode} is unknown; give one of {', '.join(MODES)}")

    @property
    def is_random(self) -> bool:
        return self.augment or any(spec.is_random for spec in parse_transforms(self.transforms))

    @property
    def has_flip_pair(self) -> bool:
        return not self.augment and mirrors_alone(parse_transforms(self.transforms))

    @property
    def is_mixed(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def _data(
        self, train: ImageSource, evaluation: ImageSource, evaluation_name: str, task: Task, wanted: ImageFormat,
        class_weights: np.ndarray | None = None, note: str = "",
    ) -> Data:  # fmt: skip
        """Fits the pictures of two splits to a model.

        Args:
            train: Pictures to train on.
            evaluation: Pictures to report on.
            evaluation_name: Name of their split.
            task: The task that their labels are for.
            wanted: What the model reads.
            class_weights: Weight of the loss of each class, (C,), as in the task.
            note: See :class:`~pipetransformer.data.base.Data`.
        """
        transforms = ImageTransforms(parse_transforms(self.transforms), wanted.size, wanted.mean)
        splits = (
            ImageSplit("train", train, wanted, task, self.augment, transforms),
            ImageSplit(evaluation_name, evaluation, wanted, task, transforms=transforms.fixed()),
        )
        if class_weights is not None:
            for split in splits:
                split.loss_weights = class_weights[split.source.labels]
        if self.is_mixed:
            how = self.mixup, self.cutmix, self.mixup_prob, self.mixup_switch_prob, self.mixup_mode
            splits[0].mixing = Mixing(*how, splits[0].input_shape, task.head.num_outputs)
        return Data(splits[0], splits[1:], task, splits[0].input_shape, self.is_random, note, self._not_saved())

    def _not_saved(self) -> tuple[str, ...]:
        """Returns the warning about transforms that evaluation takes and a saved model's preprocessing lacks."""
        specs = [spec for spec in parse_transforms(self.transforms) if not spec.is_random and spec.name != "RGB"]
        if not specs:
            return ()
        names = ", ".join(spec.name for spec in specs)
        return (
            f"dataset.transforms has {names}, also for evaluation, and the preprocessing in model/ only resizes and "
            "normalises; apply the same before it where another library loads the model",
        )

    def unlabelled(self, source: Path, wanted: ImageFormat | TextFormat, head: Head) -> Unlabelled:
        assert isinstance(wanted, ImageFormat)
        names, pictures = self._unlabelled_pictures(source)
        refuse_damaged([pictures], most=len(pictures))  # each of them is predicted
        task = image_classification(head.num_outputs, head.labels)
        transforms = ImageTransforms(parse_transforms(self.transforms), wanted.size, wanted.mean)
        split = ImageSplit("input", pictures, wanted, task, transforms=transforms.fixed())
        has_several = head.problem_type == MULTI_LABEL
        scored = ScoredSplit(split, names, head.labels, has_several)
        return Unlabelled(scored, task, split.input_shape)

    def _unlabelled_pictures(self, source: Path) -> tuple[list[dict[str, Any]], ImageSource]:
        """Reads pictures to predict, with what names each in its row."""
        names, pictures = unlabelled_files(source)
        return [{"file": name} for name in names], pictures

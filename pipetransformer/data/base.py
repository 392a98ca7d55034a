"""What a dataset hands to the trainer. Torch is imported only where tensors are made: configuration stays fast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

CLASSIFICATION, REGRESSION, QUESTION_ANSWERING = "classification", "regression", "question_answering"


@dataclass(frozen=True)
class ImageFormat:
    """What an image model wants: side length in pixels and channels (``None`` takes the data's own), normalisation."""

    size: int | None = None
    num_channels: int | None = None
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)


@dataclass(frozen=True)
class TextFormat:
    """What a text model wants: its tokenizer and the longest sequence that its positions allow."""

    tokenizer: Any
    max_length: int


class Split(ABC):
    """Samples of one split, addressed by index. All readers take many samples at once.

    Attributes:
        name: For example ``train``, ``test``, ``validation_matched``.
        lengths: Tokens of each sample before padding, shape (N,); ``None`` where all samples have the same shape.
    """

    name: str
    lengths: np.ndarray | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def identity(self) -> str:
        """A hex digest of all that decides what the model is given for the samples, in their order.

        Two splits with the same identity give equal :meth:`inputs` and :meth:`context` for the same ids. Targets have
        no part in it, nor has the split's name. It may read all of the data: call it once.
        """

    @property
    def num_scored(self) -> int:
        """How many things :meth:`score` counts; questions, where a question takes several samples."""
        return len(self)

    def set_epoch(self, epoch: int) -> None:  # noqa: B027 - most splits look the same in every epoch
        """Redraws random transforms: what a sample looks like depends on its id and the epoch alone."""

    @abstractmethod
    def inputs(self, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """Images (B, C, H, W) in float32, or token ids (B, num_tokens) padded to ``num_tokens``."""

    def context(self, ids: Sequence[int], num_tokens: int | None) -> dict[str, Tensor]:
        """What every layer may need besides the hidden state: ``attention_mask`` (B, T) of bool, ``token_type_ids``."""
        return {}

    @abstractmethod
    def targets(self, ids: Sequence[int]) -> Tensor:
        """Labels (B,) of int64, values (B,) of float32, or answers (B, 3) of int64 [start, end, number of tokens]."""

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """What :meth:`score` needs of the outputs (B, ...) for these samples: the likeliest class by default."""
        return outputs.argmax(1)

    @abstractmethod
    def score(self, predictions: np.ndarray) -> dict[str, float]:
        """Metrics, 1 is perfect, the main one first, from the predictions of all N samples in order.

        Classes (N,), values (N,), or for question answering the best spans (N, k, 3) as [start, end, score].
        """


@dataclass(frozen=True)
class Data:
    """A loaded dataset.

    Attributes:
        train: The training split.
        evaluation: The splits to report on, the main one first.
        task: One of the three task names above.
        num_outputs: Classes, 1 for regression, 2 for question answering.
        input_shape: (C, H, W) of an image, () for text.
        random_transform: True when a training sample looks different each time it is read.
        labels: Names of the classes where they are known.
    """

    train: Split
    evaluation: tuple[Split, ...]
    task: str
    num_outputs: int
    input_shape: tuple[int, ...] = ()
    random_transform: bool = False
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(ABC):
    """What a user writes about a dataset; ``load`` does the work.

    Attributes:
        path: Local file or folder; ``None`` takes the built-in or hub data.
        max_train_samples: Use at most this many training samples (a seeded draw); ``None`` uses all.
        max_eval_samples: The same for each evaluation split.
    """

    path: str | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None

    modality: ClassVar[str] = "image"  # or "text"
    libraries: ClassVar[tuple[str, ...]] = ()  # that loading imports; where ranks are forked, before that and once

    @property
    def name(self) -> str:
        """What reports call it: the file or folder, or what is known by a name."""
        return Path(self.path or self._published).resolve().name

    @property
    def _published(self) -> str:
        """The name of what is read without a path."""
        return type(self).__name__.lower()

    def check(self) -> None:
        """Raises ValueError for what can be seen to be wrong without loading torch (paths, ranges)."""
        if self.path is not None and not Path(self.path).exists():
            raise ValueError(f"dataset.path={self.path} does not exist")
        for option in ("max_train_samples", "max_eval_samples"):
            limit = getattr(self, option)
            if limit is not None and limit < 1:
                raise ValueError(f"dataset.{option}={limit} leaves no samples; give 1 or more, or null for all")

    @abstractmethod
    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        """Loads, checks and prepares the data.

        Raises:
            ValueError: Nothing to train on, labels out of range, answers outside their context, images that do not
                fit; the message says what was found and what to change.
        """

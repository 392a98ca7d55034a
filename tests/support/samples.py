"""Small made-up splits for models of every task."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipetransformer.data.base import Digest, Split
from pipetransformer.data.images.mixing import Mixing

VOCABULARY, NUM_CLASSES, IMAGE_SIZE = 50, 3, 8


class RandomImages(Split):
    """``num_samples`` pictures (3, 8, 8) with classes, mixed with each other where a mode of mixup is given."""

    def __init__(self, num_samples: int, name: str = "train", mixup: str | None = None) -> None:
        generator = np.random.default_rng(0)
        self.name = name
        self._pixels = generator.normal(size=(num_samples, 3, IMAGE_SIZE, IMAGE_SIZE))
        self._labels = generator.integers(0, NUM_CLASSES, num_samples)
        if mixup is not None:
            self.mixing = Mixing(0.8, 1.0, 0.9, 0.5, mixup, self._pixels.shape[1:], NUM_CLASSES)

    def __len__(self) -> int:
        return len(self._labels)

    def identity(self) -> str:
        digest = Digest("random images")
        digest.add(self._pixels)
        return digest.hex()

    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        assert num_tokens is None
        return torch.from_numpy(self._pixels[list(ids)])

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        return torch.from_numpy(self._labels[list(ids)])

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        return {"accuracy": float((predictions == self._labels).mean())}


class RandomText(Split):
    """``num_samples`` token sequences of different lengths, with classes, sets of classes or answer positions."""

    def __init__(
        self, num_samples: int, answers: bool = False, name: str = "train", sets: bool = False,
        class_weights: Sequence[float] = (),
    ) -> None:  # fmt: skip
        generator = np.random.default_rng(0)
        self.name = name
        self.lengths = generator.integers(3, 12, num_samples)
        self._tokens = generator.integers(5, VOCABULARY, (num_samples, 12))
        self._labels = generator.integers(0, NUM_CLASSES, num_samples)
        spans = np.sort(generator.integers(0, self.lengths[:, None], (num_samples, 2)), axis=1)
        self._targets = np.column_stack([spans, self.lengths]) if answers else self._labels
        if sets:
            self._targets = generator.integers(0, 2, (num_samples, NUM_CLASSES))
        self.loss_weights = np.array(class_weights)[self._labels] if class_weights else None

    def __len__(self) -> int:
        return len(self._labels)

    def identity(self) -> str:
        digest = Digest("random text")
        digest.add(self.lengths, self._tokens)
        return digest.hex()

    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        assert num_tokens is not None
        mask = self._mask(ids, num_tokens)
        return torch.from_numpy(np.where(mask, self._tokens[list(ids), :num_tokens], 0))

    def context(self, ids: Sequence[int], num_tokens: int | None) -> dict[str, Tensor]:
        assert num_tokens is not None
        mask = self._mask(ids, num_tokens)
        second = np.arange(num_tokens) >= self.lengths[list(ids), None] // 2
        return {
            "attention_mask": torch.from_numpy(mask),
            "token_type_ids": torch.from_numpy((second & mask).astype(np.int64)),
        }

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        return torch.from_numpy(self._targets[list(ids)])

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        return {"accuracy": float((predictions == self._labels).mean())}

    def _mask(self, ids: Sequence[int], num_tokens: int) -> np.ndarray:
        return np.arange(num_tokens) < self.lengths[list(ids), None]

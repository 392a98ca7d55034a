"""A task that the package does not know: a class for each token of a text, where every word is a token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipetransformer.data.base import Data, DatasetSpec, ImageFormat, TextFormat
from pipetransformer.data.tasks import Task
from pipetransformer.data.text.split import TextSplit, Tokens, encode
from pipetransformer.data.token_tasks import IGNORED, token_cross_entropy
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head
from pipetransformer.training.run import run_rank
from support.jobs import loaded, with_made_up_times

TAGS = {"bird": "noun", "sings": "verb", "sleeps": "verb"}
LABELS = ("other", "noun", "verb")
NO_TAG = IGNORED


def _score(predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    return {"token_accuracy": float((predictions == targets)[targets != NO_TAG].mean())}


def _output_shape(hidden: tuple[int, ...]) -> tuple[int, ...]:
    return (*hidden[:2], len(LABELS))


TAGGING = Task("tagging", Head("token", len(LABELS), LABELS), token_cross_entropy, _output_shape, _score)


class TaggedTexts(TextSplit):
    """Texts with a tag for each token."""

    def __init__(self, name: str, tokens: Tokens, tags: np.ndarray) -> None:
        super().__init__(name, tokens)
        self._tags = tags
        self.loss_weights = (tags != NO_TAG).sum(1).astype(np.float64)

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        return torch.from_numpy(self._tags[list(ids), :num_tokens])

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        tags = TAGGING.predict(outputs)
        return F.pad(tags, (0, self._tags.shape[1] - tags.shape[1]), value=NO_TAG)  # batches differ in length

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        return TAGGING.score(predictions, self._tags)


@dataclass(frozen=True, kw_only=True)
class Tagging(DatasetSpec):
    """Random texts of a few words."""

    modality: ClassVar[str] = "text"

    def preflight(self) -> int | None:
        return 24

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, TextFormat)
        return Data(self._split("train", 24, wanted), (self._split("test", 13, wanted),), TAGGING)

    def _split(self, name: str, num_texts: int, wanted: TextFormat) -> TaggedTexts:
        draw = np.random.default_rng(num_texts)
        texts = [" ".join(draw.choice(["a", *TAGS], draw.integers(2, 9))) for _ in range(num_texts)]
        tags = np.full((num_texts, 8), NO_TAG)
        for row, text in enumerate(texts):
            words = [LABELS.index(TAGS.get(word, "other")) for word in text.split()]
            tags[row, : len(words)] = words
        return TaggedTexts(name, encode((texts,), wanted.tokenizer, wanted.max_length), tags)


def tag(overrides: tuple[str, ...], folder: Path) -> None:
    """One rank of a run on tagged texts."""
    with with_made_up_times():
        run_rank(replace(loaded(*overrides), dataset=Tagging()), folder, torch.device("cpu"), {}, None)


def tag_by_mean(overrides: tuple[str, ...], folder: Path) -> str:
    """Returns the error of a rank whose task takes the mean over a micro-batch for its loss."""

    class ByMean(Tagging):
        def load(self, wanted: ImageFormat | TextFormat) -> Data:
            return replace(super().load(wanted), task=replace(TAGGING, loss=_mean_loss))

    try:
        with with_made_up_times():
            run_rank(replace(loaded(*overrides), dataset=ByMean()), folder, torch.device("cpu"), {}, None)
    except UserError as error:
        return str(error)
    return ""


def _mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    return token_cross_entropy(output, targets).mean()

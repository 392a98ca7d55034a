"""Masked language modelling: a model whose output layer is its word embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipetransformer.data.base import Digest
from pipetransformer.data.tasks import Task
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel
from support.samples import VOCABULARY, RandomText

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MASK, NOT_MASKED = 4, -100


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModel(HuggingFaceModel):
    """The encoder with the head that it was trained with."""

    def _meta_model(self, head: Head, config: "PretrainedConfig") -> "PreTrainedModel":
        from transformers import AutoModelForMaskedLM

        from pipetransformer.models.huggingface_weights import WANTED

        super()._meta_model(head, config)  # it quiets transformers
        with torch.device("meta"):
            return AutoModelForMaskedLM.from_config(config, **WANTED)


class MaskedText(RandomText):
    """Random tokens, about a third of them masked; each sample has a masked one."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self._masked = np.random.default_rng(1).random(self._tokens.shape) < 0.3
        self._masked &= np.arange(self._tokens.shape[1]) < self.lengths[:, None]
        self._masked[:, 1] = True  # no text is shorter than that

    def identity(self) -> str:
        digest = Digest("masked text")
        digest.add(super().identity(), self._masked)
        return digest.hex()

    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        masked = torch.from_numpy(self._masked[list(ids), :num_tokens])
        return super().inputs(ids, num_tokens).masked_fill(masked, MASK)

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        """(B, T) of the longest text, whatever the batch is padded to."""
        rows = list(ids)
        return torch.from_numpy(np.where(self._masked[rows], self._tokens[rows], NOT_MASKED))


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean over a sample's masked tokens; output (B, T, V), targets (B, T or more)."""
    wanted = targets[:, : output.shape[1]].long()
    by_token = F.cross_entropy(output.transpose(1, 2), wanted, ignore_index=NOT_MASKED, reduction="none")
    return by_token.sum(1) / (wanted != NOT_MASKED).sum(1)


def _score(predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    raise NotImplementedError


MASKED_LM = Task("masked_lm", Head("token", VOCABULARY), _loss, lambda hidden: (*hidden[:2], VOCABULARY), _score)

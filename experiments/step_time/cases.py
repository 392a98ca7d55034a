"""The models and data whose steps are timed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from pipetransformer.config.compose import CONF
from pipetransformer.data.base import Digest, ImageFormat, Split
from pipetransformer.data.images.datasets import Digits
from pipetransformer.data.tasks import Task, text_classification
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.stack import LayerStack
from pipetransformer.models.timm import TimmModel

VIT_TINY = CONF / "model" / "vit_tiny.yaml"
NUM_CLASSES, VOCABULARY, NUM_TOKENS, NUM_TEXTS = 10, 1000, 32, 512
WIDE = {"embed_dim": 192, "depth": 12, "patch_size": 2}
BERT = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": NUM_TOKENS,
}

TASK = text_classification(NUM_CLASSES)


@dataclass(frozen=True)
class Case:
    """One problem; the same on every process that builds it.

    Attributes:
        options: What the model differs in from the default ViT, or from :data:`BERT`.
        batch_size: Over both replicas.
    """

    name: str
    family: str
    batch_size: int
    options: dict[str, Any]

    @property
    def dropout(self) -> bool:
        """True where training draws random numbers."""
        return (
            self._vit_options()["proj_drop_rate"] if self.family == "vit" else self.options["hidden_dropout_prob"]
        ) > 0

    def stack(self, bert_folder: Path) -> LayerStack:
        """Returns the model; BERT's config.json lies in the given folder."""
        if self.family == "bert":
            spec = HuggingFaceModel(name=str(bert_folder), pretrained=False, options=self.options)
            return spec.build(Head("sequence", NUM_CLASSES), (), seed=1)
        vit = TimmModel(name="vit_tiny_patch16_224", pretrained=False, options=self._vit_options())
        return vit.build(Head("image", NUM_CLASSES), (1, 8, 8), seed=1)

    def _vit_options(self) -> dict[str, Any]:
        return yaml.safe_load(VIT_TINY.read_text(encoding="utf-8"))["options"] | self.options

    @property
    def task(self) -> Task:
        return TASK

    def split(self) -> Split:
        return RandomText() if self.family == "bert" else Digits().load(ImageFormat()).train


CASES = (
    Case("ViT 96 wide, 6 blocks, 4 tokens, dropout 0.1 (the default)", "vit", 32, {}),
    Case("the same, dropout 0", "vit", 32, {"proj_drop_rate": 0.0}),
    Case("ViT 192 wide, 12 blocks, 16 tokens, dropout 0", "vit", 64, {**WIDE, "proj_drop_rate": 0.0}),
    Case("BERT, dropout 0", "bert", 32, {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    Case("BERT, dropout 0.1", "bert", 32, {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}),
)


def write_bert(folder: Path) -> None:
    """Makes a folder a BERT without weights, of the size :data:`BERT`."""
    (folder / "config.json").write_text(json.dumps(BERT), encoding="utf-8")


class RandomText(Split):
    """Made-up token sequences of one length with classes."""

    name = "train"

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self._tokens = torch.from_numpy(generator.integers(5, VOCABULARY, (NUM_TEXTS, NUM_TOKENS)))
        self._labels = torch.from_numpy(generator.integers(0, NUM_CLASSES, NUM_TEXTS))

    def __len__(self) -> int:
        return NUM_TEXTS

    def identity(self) -> str:
        digest = Digest("random text")
        digest.add(self._tokens.numpy())
        return digest.hex()

    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        return self._tokens[list(ids)]

    def context(self, ids: Sequence[int], num_tokens: int | None) -> dict[str, Tensor]:
        return {"attention_mask": torch.ones(len(ids), NUM_TOKENS, dtype=torch.bool)}

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        return self._labels[list(ids)]

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        raise NotImplementedError("steps are timed, nothing is evaluated")

"""The models that are timed, with the original library's own model of the same weights, and made-up data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipetransformer.data.base import Digest, Split
from pipetransformer.data.tasks import Task, image_classification, text_classification
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.layer import Layer, deep_copy
from pipetransformer.models.stack import LayerStack
from pipetransformer.models.timm import TimmModel

SEED, NUM_BATCHES = 1, 4
"""Batches that both loops go through again and again."""
_STACKS: dict[str, LayerStack] = {}  # to draw the weights of a large model takes seconds


@dataclass(frozen=True)
class Case:
    """One model on one device.

    Attributes:
        family: ``vit`` of timm or ``bert`` of transformers.
        size: Pixels of an image's side, or tokens of a text.
        options: Differences from ViT-B/16 or BERT-base, for the original library's constructor.
        randomness: Of the runtime's dropout.
        prefixes: Frozen prefixes that are timed.
    """

    name: str
    family: str
    batch_size: int
    size: int
    num_classes: int
    options: dict[str, Any] = field(default_factory=dict)
    randomness: str = "sample"
    prefixes: tuple[int, ...] = (0, 3, 6, 9, 11)

    @property
    def task(self) -> Task:
        make = image_classification if self.reads_images else text_classification
        return make(self.num_classes)

    @property
    def draws(self) -> bool:
        """True where training draws random numbers, so that two loops see different losses."""
        return not self.reads_images and self.options.get("hidden_dropout_prob", 0.1) > 0

    @property
    def reads_images(self) -> bool:
        return self.family == "vit"

    @property
    def num_blocks(self) -> int:
        return self.options.get("depth", self.options.get("num_hidden_layers", 12))

    def stack(self, folder: Path) -> LayerStack:
        """Returns the model with random weights, the same each time.

        Args:
            folder: Takes BERT's configuration.
        """
        if self.name not in _STACKS:
            _STACKS[self.name] = self._stack(folder)
        return deep_copy(_STACKS[self.name])

    def _stack(self, folder: Path) -> LayerStack:
        if self.reads_images:
            vit = TimmModel(name="vit_base_patch16_224", pretrained=False, options=self.options)
            return vit.build(self.task.head, (3, self.size, self.size), SEED)
        from transformers import BertConfig

        BertConfig(**self.options).save_pretrained(folder)
        return HuggingFaceModel(name=str(folder), pretrained=False).build(self.task.head, (), SEED)

    def original(self, stack: LayerStack) -> nn.Module:
        """Returns the original library's model with a stack's weights."""
        model = self._original()
        weights = {name: each for index in range(len(stack)) for name, each in stack[index].original_state().items()}
        unknown = model.load_state_dict(weights, strict=False).unexpected_keys
        assert not unknown, unknown
        return model

    def _original(self) -> nn.Module:
        if self.reads_images:
            import timm

            sizes: dict[str, Any] = {"img_size": self.size, "num_classes": self.num_classes}
            return timm.create_model("vit_base_patch16_224", **sizes, **self.options)
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(**self.options, num_labels=self.num_classes)
        config._attn_implementation = "sdpa"
        return BertForSequenceClassification(config)

    def split(self) -> Split:
        return MadeUp(self)

    def samples(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns random images (N, 3, H, W), or texts of one length (N, T), with random classes (N,)."""
        draw = torch.Generator().manual_seed(SEED)
        if self.reads_images:
            inputs = torch.randn(number, 3, self.size, self.size, generator=draw)
        else:
            inputs = torch.randint(5, self.options.get("vocab_size", 30522), (number, self.size), generator=draw)
        return inputs, torch.randint(self.num_classes, (number,), generator=draw)


BERT_WITHOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CASES = (
    Case("ViT-B/16, 224 pixels, batch 128", "vit", 128, 224, 1000),
    Case("BERT-base, 384 tokens, batch 32, dropout 0", "bert", 32, 384, 2, BERT_WITHOUT),
    Case("the same, dropout 0.1 by the device", "bert", 32, 384, 2, randomness="device"),
    Case("the same, dropout 0.1 by sample", "bert", 32, 384, 2),
)
_SMALL_BERT = {
    "vocab_size": 200, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 16,
}  # fmt: skip
SMALL = (
    Case("small ViT", "vit", 4, 32, 10, {"embed_dim": 16, "depth": 4, "num_heads": 2}, prefixes=(0, 2)),
    Case("small BERT", "bert", 4, 16, 2, _SMALL_BERT | BERT_WITHOUT, prefixes=(0, 2)),
    Case("small BERT that drops out", "bert", 4, 16, 2, _SMALL_BERT, randomness="device", prefixes=(2,)),
)
"""As :data:`CASES`, for a CPU: to see that the code works, and nothing about speed."""


class MadeUp(Split):
    """Random images, or texts of one length, with random classes."""

    name = "train"

    def __init__(self, case: Case) -> None:
        self._reads_images = case.reads_images
        self._inputs, self._labels = case.samples(NUM_BATCHES * case.batch_size)

    def __len__(self) -> int:
        return len(self._labels)

    def identity(self) -> str:
        digest = Digest("made up")
        digest.add(self._inputs.numpy())
        return digest.hex()

    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        return self._inputs[list(ids)]

    def context(self, ids: Sequence[int], num_tokens: int | None) -> dict[str, Tensor]:
        if self._reads_images:
            return {}
        return {"attention_mask": torch.ones(len(ids), self._inputs.shape[1], dtype=torch.bool)}

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        return self._labels[list(ids)]

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        raise NotImplementedError("steps are timed, nothing is evaluated")


def frozen_parts(stack: LayerStack, model: nn.Module, num_frozen: int) -> tuple[list[nn.Parameter], list[nn.Module]]:
    """Returns the weights and the blocks of the original model that are frozen with a prefix of the stack."""
    named, layers = dict(model.named_parameters()), list[Layer]()
    if num_frozen:
        layers = [stack[index] for index in range(num_frozen + 1)]
    weights = [named[name] for layer in layers for name in layer.by_name()]
    return weights, [model.get_submodule(layer.prefix.rstrip(".")) for layer in layers[1:]]

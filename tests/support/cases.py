"""Tiny models with their data, in float64 unless asked, for every comparison of two ways to train."""

import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from timm.layers import SwiGLUPacked
from torch import nn

from pipetransformer.data.base import Split
from pipetransformer.data.tasks import (
    Task,
    image_classification,
    multi_label_classification,
    question_answering,
    text_classification,
)
from pipetransformer.models.adapters import Lora
from pipetransformer.models.base import ModelSpec
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.huggingface_vision import HuggingFaceVisionModel
from pipetransformer.models.layer import Layer, deep_copy
from pipetransformer.models.lora import head_modules
from pipetransformer.models.stack import LayerStack
from pipetransformer.models.timm import TimmModel
from pipetransformer.optim.base import SGD, AdamW, Lamb, OptimizerSpec
from pipetransformer.optim.named import TimmOptimizer, TorchOptimizer
from pipetransformer.runtime.precision import PRECISIONS
from support import decoders, encoders, towers
from support.by_token import TAGGING, next_token, prompted_texts, tagged_texts
from support.masked import MASKED_LM, MaskedLanguageModel, MaskedText
from support.own_optimizer import OwnOptimizer
from support.samples import IMAGE_SIZE, NUM_CLASSES, VOCABULARY, RandomImages, RandomText

CLASS_WEIGHTS = (0.5, 2.0, 1.25)
NUM_BLOCKS, SEED, LEARNING_RATE, CLIP_NORM = 6, 3, 0.01, 0.5
MEASURED_WIDTH = 64  # of models whose memory is measured
OPTIMIZERS: dict[str, OptimizerSpec] = {
    # eps: a gradient that cancels but for its rounding (of a key's bias, 1e-17) moves a weight by lr / eps times that
    "adamw": AdamW(lr=LEARNING_RATE, weight_decay=0.1, clip_norm=CLIP_NORM, eps=1e-6),
    "adamw_by_layer": AdamW(lr=LEARNING_RATE, weight_decay=0.1, clip_norm=CLIP_NORM, eps=1e-6, layer_decay=0.7),
    "adamw_ema": AdamW(lr=LEARNING_RATE, weight_decay=0.1, clip_norm=CLIP_NORM, eps=1e-6, ema_decay=0.5),
    "adan_ema": TimmOptimizer(name="adan", lr=LEARNING_RATE, clip_norm=CLIP_NORM, options={"eps": 1e-6}, ema_decay=0.5),
    "sgd": SGD(lr=LEARNING_RATE, weight_decay=0.1, clip_norm=CLIP_NORM),
    "lamb": Lamb(lr=LEARNING_RATE, weight_decay=0.1, clip_norm=CLIP_NORM),
    "Adafactor": TorchOptimizer(name="Adafactor", lr=LEARNING_RATE, weight_decay=0.1, clip_norm=CLIP_NORM),
    "NAdam": TorchOptimizer(name="NAdam", lr=LEARNING_RATE, clip_norm=CLIP_NORM, options={"eps": 1e-6}),
    "NAdam at once": TorchOptimizer(
        name="NAdam", lr=LEARNING_RATE, clip_norm=CLIP_NORM, options={"eps": 1e-6, "foreach": True}
    ),
    "adan": TimmOptimizer(name="adan", lr=LEARNING_RATE, weight_decay=0.1, clip_norm=CLIP_NORM, options={"eps": 1e-6}),
    "adafactor": TimmOptimizer(name="adafactor", lr=LEARNING_RATE, clip_norm=CLIP_NORM, options={"eps": 1e-12}),
    "muon": TimmOptimizer(name="muon", lr=LEARNING_RATE, clip_norm=CLIP_NORM, options={"eps": 1e-6}),
    "laprop": TimmOptimizer(name="laprop", lr=LEARNING_RATE, clip_norm=CLIP_NORM, options={"eps": 1e-6}),
    "own": OwnOptimizer(lr=LEARNING_RATE, weight_decay=0.1, clip_norm=CLIP_NORM),
}
DROPOUTS, CAUSAL = decoders.DROPOUTS | encoders.DROPOUTS, ("gpt2", "gemma3_text")


@dataclass(frozen=True)
class Case:
    """One training problem; the same on every process that builds it.

    Attributes:
        kind: ``vit``, ``vit_pooled`` (without class token; its layers return strided tensors), ``vit_gated`` (values
            and gates are one matrix), ``vit_map`` (its head pools by attention), ``bert``, ``bert_qa``, ``bert_tags``,
            or ``bert_mlm``, whose output layer is its word embeddings; ``bert_weighted`` (class weights and smoothed
            labels) and ``bert_sets`` (any number of classes for a sample); of decoders ``gpt2`` and ``gemma3_text``,
            whose output layers are their word embeddings, too, and ``llama``, which classifies; and the encoders of
            :mod:`support.encoders` and :mod:`support.towers`.
        folder: Where the configurations lie, the same ones everywhere (see :func:`write_config`).
        num_samples: With ``batch_size`` not a divisor, the last batch of an epoch is smaller.
        width: Of the model.
        num_heads: Of ``vit`` and BERTs.
        loss_scale: To begin with, in float16; small enough for its gradients to stay within its range.
        cache_shares: What of all features there is room for in memory and on disk.
        device: ``cpu`` or ``cuda``, each rank its own GPU.
        lora: Adapters train, with dropout of their inputs where there is any, and the head.
        kernels: Key of :data:`support.kernels.KERNELS`, with which it is trained.
        mixup: Mode of mixup and cutmix of the pictures; ``None``: they stay apart.
        row_length: Tokens of a row that documents share; ``None``: each has its own.
        parks: Blocks that train again go on with the optimizer state that they froze with.
        randomness: Of dropout.
        compiles: Blocks are compiled.
        vocabulary: Of BERTs and decoders; the texts have tokens of :data:`VOCABULARY` alone.
    """

    kind: str
    folder: Path = field(compare=False)
    dropout: float = 0.0
    optimizer: str = "adamw"
    num_samples: int = 20
    batch_size: int = 8
    num_steps: int = 7
    width: int = 16
    num_heads: int = 2
    precision: str = "float64"
    loss_scale: float = 2.0**12
    cache_shares: tuple[float, float] = (1.0, 0.0)
    device: str = "cpu"
    lora: bool = False
    kernels: str = "native"
    mixup: str | None = None
    row_length: int | None = None
    parks: bool = False
    randomness: str = "sample"
    compiles: bool = False
    vocabulary: int = VOCABULARY

    @property
    def task(self) -> Task:
        return {
            "vit": image_classification(NUM_CLASSES),
            "vit_pooled": image_classification(NUM_CLASSES),
            "vit_gated": image_classification(NUM_CLASSES),
            "vit_map": image_classification(NUM_CLASSES),
            **dict.fromkeys(towers.KINDS, image_classification(NUM_CLASSES)),
            "bert": text_classification(NUM_CLASSES),
            "bert_qa": question_answering(),
            "bert_tags": TAGGING,
            "bert_mlm": MASKED_LM,
            "bert_weighted": text_classification(NUM_CLASSES, class_weights=CLASS_WEIGHTS, label_smoothing=0.1),
            "bert_sets": multi_label_classification(NUM_CLASSES),
            "llama": text_classification(NUM_CLASSES),
            **dict.fromkeys(encoders.DROPOUTS, text_classification(NUM_CLASSES)),
            **dict.fromkeys(CAUSAL, next_token(self.vocabulary)),
        }[self.kind]

    @property
    def reads_images(self) -> bool:
        return self.kind in ("vit", "vit_pooled", "vit_gated", "vit_map", *towers.KINDS)

    def spec(self) -> ModelSpec:
        if self.kind in towers.CONFIGS:
            rates = dict.fromkeys(towers.DROPOUTS.get(self.kind, ()), self.dropout)
            return HuggingFaceVisionModel(name=str(self.folder / self.kind), pretrained=False, options=rates)
        if self.reads_images:
            options = {"patch_size": 4, "embed_dim": self.width, "depth": NUM_BLOCKS, "num_heads": self.num_heads}
            options |= {"class_token": False, "global_pool": "avg"} if self.kind == "vit_pooled" else {}
            options |= {"mlp_layer": SwiGLUPacked} if self.kind == "vit_gated" else {}
            options |= {"class_token": False, "global_pool": "map"} if self.kind == "vit_map" else {}
            rates = {"proj_drop_rate": self.dropout, "attn_drop_rate": self.dropout, "drop_path_rate": self.dropout}
            if self.kind == "eva02":  # whose head begins so small that the loss would hardly tell what the blocks do
                rates["head_init_scale"] = 1.0
                return TimmModel(name="eva02_tiny_patch14_224", pretrained=False, options=options | rates)
            return TimmModel(name="vit_tiny_patch16_224", pretrained=False, options=options | rates)
        if self.kind in DROPOUTS:
            options = dict.fromkeys(DROPOUTS[self.kind], self.dropout)
            options |= {} if self.vocabulary == VOCABULARY else {"vocab_size": self.vocabulary}
            return HuggingFaceModel(name=str(self.folder / self.kind), pretrained=False, options=options)
        rates = {"hidden_dropout_prob": self.dropout, "attention_probs_dropout_prob": self.dropout}
        sizes = {"hidden_size": self.width, "intermediate_size": 2 * self.width, "num_attention_heads": self.num_heads}
        sizes["vocab_size"] = self.vocabulary
        family = MaskedLanguageModel if self.kind == "bert_mlm" else HuggingFaceModel
        return family(name=str(self.folder), pretrained=False, options=rates | sizes)

    def stack(self) -> LayerStack:
        stack = deep_copy(
            _stack(
                Case(
                    self.kind, self.folder, self.dropout, width=self.width, num_heads=self.num_heads,
                    vocabulary=self.vocabulary,
                )
            )
        )  # fmt: skip
        if self.lora:
            self.adapters.apply(stack, SEED)
        return stack.to(PRECISIONS[self.precision].param_dtype)

    @property
    def adapters(self) -> Lora:
        return Lora(r=3, alpha=5.0, dropout=self.dropout)

    def split(self) -> Split:
        if self.kind == "bert_mlm":
            return MaskedText(self.num_samples)
        if self.kind in CAUSAL:
            split = prompted_texts(self.num_samples, self.vocabulary)
            split.row_length = self.row_length
            return split
        if self.task is TAGGING:
            return tagged_texts(self.num_samples)
        if self.reads_images:
            return RandomImages(self.num_samples, mixup=self.mixup)
        weights = CLASS_WEIGHTS if self.kind == "bert_weighted" else ()
        return RandomText(
            self.num_samples, answers=self.kind == "bert_qa", sets=self.kind == "bert_sets", class_weights=weights
        )

    def original(self) -> nn.Module:
        """The original library's model with the stack's weights, its parameters named as the stack's are."""
        stack = replace(self, lora=False).stack()
        state = {name: t for layer in stack.layers for name, t in layer.original_state().items()}
        model = self._original()
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected, unexpected
        assert all("pooler" in name or "position_ids" in name for name in missing), missing
        return adapted(model.double(), self) if self.lora else model.double()

    def _original(self) -> nn.Module:
        spec = self.spec()
        if isinstance(spec, TimmModel):
            import timm

            sizes: dict[str, Any] = {"img_size": IMAGE_SIZE, "num_classes": NUM_CLASSES}
            return timm.create_model(spec.name, **sizes, **spec.options)
        import transformers

        if self.kind in towers.CONFIGS:
            return transformers.AutoModelForImageClassification.from_config(self.stack().config[1])
        if self.kind in DROPOUTS:
            config = transformers.AutoConfig.from_pretrained(self.folder / self.kind, num_labels=NUM_CLASSES)
            is_causal = self.kind in CAUSAL
            family = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForSequenceClassification
            return family.from_config(config)
        config = transformers.BertConfig.from_pretrained(self.folder)
        if self.kind == "bert_qa":
            return transformers.BertForQuestionAnswering(config)
        if self.kind == "bert_mlm":
            return transformers.BertForMaskedLM(config)
        config.num_labels = NUM_CLASSES
        if self.kind == "bert_tags":
            return transformers.BertForTokenClassification(config)
        return transformers.BertForSequenceClassification(config)


def adapted(model: nn.Module, case: Case) -> nn.Module:
    """The model as peft's own users make it, with the stack's initial adapters."""
    import peft

    stack, spec = case.stack(), case.adapters
    targets = ["query", "value"] if not case.reads_images else r"blocks\..*\.(qkv|proj|fc1|fc2)"
    config = peft.LoraConfig(
        r=spec.r, lora_alpha=spec.alpha, target_modules=targets, modules_to_save=head_modules(stack)
    )  # fmt: skip
    wrapped = peft.get_peft_model(cast("Any", model), config, autocast_adapter_dtype=False)
    named = dict(wrapped.named_parameters(remove_duplicate=False))
    for layer in stack.layers:
        for name, tensor in cast("Layer", layer).by_name().items():
            if ".lora_" in name:
                named[f"base_model.model.{name}"].data.copy_(tensor.detach())
    return wrapped


def name_in_stack(name: str) -> str:
    """The stack's name of a parameter of peft's model; empty for the weights that it keeps of the head before."""
    name = name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
    return "" if "original_module" in name else name


@cache
def _stack(case: Case) -> LayerStack:
    """Made once in a process, or in the one that it was forked from: that takes longer than to train it."""
    shape = (3, IMAGE_SIZE, IMAGE_SIZE) if case.reads_images else ()
    return case.spec().build(case.task.head, shape, SEED).double()


def make_stacks() -> None:
    """Makes those that most tests train."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(Path(name))
        for kind, dropout in product(("vit", "bert", "bert_qa", "bert_mlm", "distilbert"), (0.0, 0.2)):
            Case(kind, folder, dropout).stack()
        for kind in ("vit", "bert"):
            Case(kind, folder, width=MEASURED_WIDTH).stack()


def write_config(folder: Path) -> Path:
    """A BERT of :data:`NUM_BLOCKS` tiny blocks, without weights, and decoders in folders of their own."""
    import transformers

    decoders.write_configs(folder, NUM_BLOCKS)
    encoders.write_configs(folder, NUM_BLOCKS)
    towers.write_configs(folder, NUM_BLOCKS)

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.save_pretrained(folder)
    return folder


def tensors_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")

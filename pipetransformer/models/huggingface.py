"""Encoders of Hugging Face transformers as a flat stack."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pipetransformer.models.base import Head, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from pipetransformer.models.stack import LayerStack

HEADS = {
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
}
_REMEDY = "Without network give model.name=<folder> with config.json, weights and tokenizer"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel(ModelSpec):
    """An encoder with a head for the dataset's task. From scratch it takes the configuration and tokenizer of ``name``.

    Attributes:
        options: What to change in the model's config.json: hidden_dropout_prob, num_hidden_layers, ...
    """

    options: dict[str, Any] = field(default_factory=dict)

    modality: ClassVar[str] = "text"
    libraries: ClassVar[tuple[str, ...]] = ("transformers.modeling_utils",)

    def check(self) -> None:
        if "num_labels" in self.options:
            raise ValueError("model.options.num_labels is not an option: it follows from the data")

    def input_format(self) -> dict[str, Any]:
        """Keyword arguments of ``TextFormat``."""
        return {"tokenizer": self._tokenizer(), "max_length": self._num_positions()}

    def outline(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        from pipetransformer.models.huggingface_layers import check_same_outputs, cut
        from pipetransformer.models.huggingface_weights import Drawn
        from pipetransformer.models.stack import seeded

        self.check()
        if input_shape:
            raise ValueError(f"model.name={self.name} reads text, the dataset has images {input_shape}; choose a ViT")
        model = self._outline(head)
        stack = cut(model)
        with seeded(seed):
            check_same_outputs(model)
            if self.pretrained:
                return self._published(stack, head.kind, seed)
        stack.source = Drawn(model, stack, seed)
        return stack

    def save(self, stack: LayerStack, state: dict[str, Tensor], folder: Path) -> None:
        """Writes config.json, model.safetensors and the tokenizer for ``from_pretrained(folder)``."""
        import torch

        _quiet()
        model_class, config = stack.config
        with torch.device("meta"):
            model = model_class(config)
        model.load_state_dict({name: tensor.cpu() for name, tensor in state.items()}, assign=True)
        model.tie_weights()  # what the layers share is written once
        model.save_pretrained(folder)
        self._tokenizer().save_pretrained(folder)

    def _outline(self, head: Head) -> PreTrainedModel:
        """The task model without storage."""
        import torch
        import transformers

        from pipetransformer.models.huggingface_weights import WANTED

        if head.kind not in HEADS:
            raise ValueError(
                f"model.name={self.name} has no head for a task of kind {head.kind}; it has {', '.join(HEADS)}"
            )
        family = getattr(transformers, HEADS[head.kind])
        _quiet()
        config = self._config()
        config.num_labels = head.num_outputs
        with self._explained(head.kind), torch.device("meta"):
            return family.from_config(config, **WANTED)

    def _published(self, stack: LayerStack, kind: str, seed: int) -> LayerStack:
        """The stack with the published weights as its source, or whole where they cannot be read layer by layer."""
        from pipetransformer.models.huggingface_layers import cut
        from pipetransformer.models.huggingface_weights import WANTED, Published, find_checkpoint, load_tags

        model_class, config = stack.config
        with self._explained(kind):
            checkpoint = find_checkpoint(self.name)
        if checkpoint is not None:
            model, report = load_tags(model_class, config, checkpoint.tags())
            self._check_complete(model, report)
            keys = checkpoint.origins(model.state_dict().items())
            if model.state_dict().keys() <= keys.keys() | _lacking(report):
                stack.source = Published(stack, checkpoint, keys, seed)
                return stack
        with self._explained(kind):
            model, report = model_class.from_pretrained(
                self.name, config=config, ignore_mismatched_sizes=True, output_loading_info=True, **WANTED
            )
        self._check_complete(model, report)
        why = "transformers converts them" if checkpoint else "there is no model.safetensors"
        warnings.warn(
            f"every process reads all weights of model.name={self.name} before it keeps its own: {why}; save the model "
            "once with save_pretrained to avoid it",
            stacklevel=2,
        )
        return cut(model)

    @contextmanager
    def _explained(self, kind: str) -> Iterator[None]:
        from safetensors import SafetensorError

        from pipetransformer.models.huggingface_layers import SUPPORTED

        try:
            yield
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"transformers could not load model.name={self.name} with a {kind} head: {_first_line(error)} "
                f"Supported are {SUPPORTED}. {_REMEDY}, or model.pretrained=false to draw the weights"
            ) from error

    def _check_complete(self, model: PreTrainedModel, report: dict[str, Any]) -> None:
        base, pooler = f"{model.base_model_prefix}.", f"{model.base_model_prefix}.pooler."
        lacking = sorted(key for key in _lacking(report) if key.startswith(base) and not key.startswith(pooler))
        if lacking:
            raise ValueError(
                f"the weights of model.name={self.name} lack {len(lacking)} tensors of the encoder, the first "
                f"{lacking[0]}; change model.options={self.options} or give model.pretrained=false"
            )

    def _config(self) -> PretrainedConfig:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        from pipetransformer.models.huggingface_layers import SUPPORTED

        try:
            found: Any = AutoConfig.from_pretrained(self.name, return_unused_kwargs=True, **self.options)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"transformers found no model under model.name={self.name}: {_first_line(error)} {_REMEDY}"
            ) from error
        except StrictDataclassError as error:
            raise ValueError(f"model.options={self.options} does not fit model.name={self.name}: {error}") from error
        config, unknown = found
        if unknown:
            raise ValueError(f"model.options has {', '.join(unknown)}, the config.json of {config.model_type} does not")
        if config.is_encoder_decoder or getattr(config, "is_decoder", False):
            raise ValueError(f"model.name={self.name} ({config.model_type}) has a decoder; supported are {SUPPORTED}")
        return config

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        try:
            tokenizer = cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(self.name))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"transformers found no tokenizer under model.name={self.name}: {_first_line(error)} {_REMEDY}"
            ) from error
        # without tokenizer files transformers makes one that takes every word for an unknown one
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError(f"transformers found no tokenizer under model.name={self.name}: no words in it. {_REMEDY}")
        return tokenizer

    def _num_positions(self) -> int:
        """Tokens that the positions allow; where padding has a position (RoBERTa), numbers start behind it."""
        import torch
        from transformers import AutoModel

        with torch.device("meta"):
            positions = AutoModel.from_config(self._config()).get_submodule("embeddings.position_embeddings")
        assert isinstance(positions, torch.nn.Embedding)
        return positions.num_embeddings - (0 if positions.padding_idx is None else positions.padding_idx + 1)


def _lacking(report: dict[str, Any]) -> set[str]:
    """What the published weights do not have, or not in this shape."""
    return {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}


def _quiet() -> None:
    """No progress bars and no notes on the new head, from every process; what is wrong with the weights raises."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

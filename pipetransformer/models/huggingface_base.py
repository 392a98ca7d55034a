"""A model of Hugging Face transformers as a flat stack: its configuration, its weights, and what it must not be."""

from __future__ import annotations

import copy
import re
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pipetransformer.errors import UserError
from pipetransformer.hub import TIMEOUT_S
from pipetransformer.models.base import Head, ModelSpec
from pipetransformer.models.files import check_code, read_settings, refuse_pickle
from pipetransformer.models.hub import CONFIG, check_folder, check_repository, has_file

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from pipetransformer.models.stack import LayerStack

SAFE_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
NOT_RUN = (".embeddings.mask_token", ".attn.masked_bias")  # DINOv2's in pretraining, a constant of old GPT-2s
FROM_DATA = "it follows from the data"
NOT_AN_OPTION = {
    **dict.fromkeys(("num_labels", "problem_type", "id2label", "label2id"), FROM_DATA),
    **dict.fromkeys(("dtype", "torch_dtype"), "use precision="),
    "trust_remote_code": "use model.trust_remote_code",
}
REMEDY = (
    "Without network give model.name=<folder> with config.json, weights and tokenizer or image processor, or "
    "HF_HUB_OFFLINE=1"
)
BROKEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""Errors of a model that is built in another way."""


@dataclass(frozen=True, kw_only=True)
class TransformersSpec(ModelSpec):
    """A model of transformers with a head for the dataset's task.

    From scratch it takes the configuration of ``name``.

    Attributes:
        options: What to change in the model's config.json: hidden_dropout_prob, num_hidden_layers, ...
        trust_remote_code: Run Python code that comes with the model or its preprocessing; ``False`` refuses that.
        heads: For each kind of head the class of transformers that has it.
        preprocessing: File with the settings of tokenizer or image processor.
    """

    options: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    heads: ClassVar[dict[str, str]]
    preprocessing: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]] = ("transformers.modeling_utils",)

    def check(self) -> None:
        for name, remedy in NOT_AN_OPTION.items():
            if name in self.options:
                raise UserError(f"model.options.{name} is not an option: {remedy}")

    def check_exists(self, timeout_s: float = TIMEOUT_S) -> None:
        if Path(self.name).is_dir():
            check_folder(self.name, "give one that save_pretrained wrote")
            for file in (CONFIG, self.preprocessing):
                check_code(self.name, file, read_settings(Path(self.name) / file), self.trust_remote_code)
            self._check_pickle()
        else:
            check_repository(self.name, self.name, CONFIG, timeout_s)

    def _check_pickle(self) -> None:
        """Raises UserError where the folder or repository has weights, but only pickled ones."""
        if self.allow_pickle or not self.pretrained:
            return
        local = Path(self.name) if Path(self.name).is_dir() else None
        has = (lambda file: (local / file).is_file()) if local else (lambda file: has_file(self.name, file))
        if not any(map(has, SAFE_WEIGHTS)) and (pickled := next(filter(has, PICKLED_WEIGHTS), None)):
            raise refuse_pickle(self.name, pickled)

    def build_meta(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        from pipetransformer.models.huggingface_layers import check_runs_by_layers, is_decoder, split_layers
        from pipetransformer.models.huggingface_weights import RandomInit
        from pipetransformer.models.stack import seeded

        self.check()
        model = self._meta_model(head, self._config_for(input_shape))
        with seeded(seed):
            with self._refusing(type(model).__name__):
                if head.kind == "causal" and not is_decoder(model):
                    raise UserError("its tokens see those after them; a causal head takes a decoder")
                stack = split_layers(model).train()
                idle = check_runs_by_layers(model)
            if self.pretrained:
                stack = self._published(stack, head.kind, seed)
            else:
                stack.source = RandomInit(model, stack, seed)
            stack.note_idle(idle)
            return stack

    @abstractmethod
    def _config_for(self, input_shape: tuple[int, ...]) -> PretrainedConfig:
        """Returns the configuration of a model for inputs of a shape.

        Raises:
            UserError: It does not read such inputs.
        """

    def save(self, stack: LayerStack, state: dict[str, Tensor], folder: Path) -> None:
        """Writes config.json, model.safetensors, and tokenizer or image processor for ``from_pretrained(folder)``."""
        model = self._filled(stack, state)
        self._save_preprocessing(model, folder)
        model.save_pretrained(folder)

    def save_settings(self, stack: LayerStack, folder: Path) -> None:
        import torch

        model_class, config = stack.config
        with torch.device("meta"):
            model = model_class(copy.deepcopy(config))
        self._save_preprocessing(model, folder)
        model.config.save_pretrained(folder)

    @abstractmethod
    def _save_preprocessing(self, model: PreTrainedModel, folder: Path) -> None:
        """Writes the tokenizer or image processor of a task model, which learns from it what it has to know."""

    def _filled(self, stack: LayerStack, state: dict[str, Tensor]) -> PreTrainedModel:
        """Returns the task model with weights, those that the layers share once."""
        import torch

        _quiet()
        model_class, config = stack.config
        with torch.device("meta"):
            model = model_class(config)
        model.load_state_dict({name: tensor.cpu() for name, tensor in state.items()}, assign=True)
        model.tie_weights()  # what the layers share is written once
        return model

    def _meta_model(self, head: Head, config: PretrainedConfig) -> PreTrainedModel:
        """Returns the task model without storage."""
        import torch
        import transformers

        from pipetransformer.models.huggingface_weights import WANTED

        if head.kind not in self.heads:
            raise UserError(
                f"model.name={self.name} has no head for a task of kind {head.kind}; it has {', '.join(self.heads)}"
            )
        family = getattr(transformers, self.heads[head.kind])
        _quiet()
        if head.kind != "causal":
            _name_labels(config, head.labels or [f"LABEL_{index}" for index in range(head.num_outputs)])
        config.problem_type = cast("Any", head.problem_type)
        with self._explained(head.kind), self._with_options(), torch.device("meta"):
            return family.from_config(config, trust_remote_code=self.trust_remote_code, **WANTED)

    def _published(self, stack: LayerStack, kind: str, seed: int) -> LayerStack:
        """Returns the stack with pretrained weights as its source, or loaded if they cannot be read layer by layer."""
        from pipetransformer.models.huggingface_layers import split_layers
        from pipetransformer.models.huggingface_weights import WANTED, Pretrained, find_checkpoint, load_state

        model_class, config = stack.config
        with self._explained(kind):
            checkpoint = find_checkpoint(self.name)
        if checkpoint is not None:
            model, report = load_state(model_class, config, checkpoint.placeholders())
            self._check_complete(model, report, stack, kind)
            keys = checkpoint.origins(model.state_dict().items())
            if model.state_dict().keys() <= keys.keys() | _lacking(report):
                stack.source = Pretrained(stack, checkpoint, keys, seed)
                return stack
        if checkpoint is None:
            self._check_pickle()
        with self._explained(kind):
            model, report = model_class.from_pretrained(
                self.name,
                config=config,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                use_safetensors=checkpoint is not None or not self.allow_pickle,
                weights_only=True,
                **WANTED,
            )
        self._check_complete(model, report, stack, kind)
        why = "transformers converts them" if checkpoint else "there is no model.safetensors"
        warnings.warn(
            f"every process reads all weights of model.name={self.name} before it keeps its own: {why}; save the model "
            "once with save_pretrained to avoid it",
            stacklevel=2,
        )
        return split_layers(model).train()

    @contextmanager
    def _explained(self, kind: str) -> Iterator[None]:
        from pickle import UnpicklingError

        from safetensors import SafetensorError

        from pipetransformer.models.huggingface_layers import SUPPORTED

        try:
            yield
        except UserError:
            raise
        except (*BROKEN, OSError, ImportError, SafetensorError, UnpicklingError) as error:
            raise UserError(
                f"transformers could not load model.name={self.name} with a {kind} head: {first_line(error)}. "
                f"Supported are {SUPPORTED}. {REMEDY}, or model.pretrained=false to draw the weights"
            ) from error

    @contextmanager
    def _with_options(self) -> Iterator[None]:
        """Raises errors of making a model from its configuration again with the options that it was given."""
        try:
            yield
        except (*BROKEN, AssertionError) as error:
            if not self.options:
                raise
            raise UserError(
                f"model.options={self.options} does not fit model.name={self.name}: {first_line(error)}"
            ) from error

    @contextmanager
    def _refusing(self, kind: str) -> Iterator[None]:
        """Raises errors of the checks again with the model's name, its kind and the supported kinds."""
        from pipetransformer.models.huggingface_layers import SUPPORTED

        try:
            yield
        except BROKEN as error:
            raise UserError(
                f"model.name={self.name} ({kind}) does not run layer by layer: {first_line(error)}; "
                f"supported are {SUPPORTED}"
            ) from error

    def _check_complete(self, model: PreTrainedModel, report: dict[str, Any], stack: LayerStack, kind: str) -> None:
        """Raises UserError for weights that lack tensors of the encoder, or have tensors that it has no place for.

        A causal head is no new part: its published weights say what comes next, drawn ones would unlearn it.
        """
        from pipetransformer.models.huggingface_heads import find_base

        prefix, _ = find_base(model)
        base, pooler = f"{prefix}.", f"{prefix}.pooler."
        lacking = sorted(key for key in _lacking(report) if key.startswith(base) and not key.startswith(pooler))
        if lacking:
            raise UserError(
                f"the weights of model.name={self.name} lack {len(lacking)} tensors of the encoder, the first "
                f"{lacking[0]}; change model.options={self.options} or give model.pretrained=false"
            )
        if kind == "causal" and (lacking := sorted(_lacking(report))):
            raise UserError(
                f"the weights of model.name={self.name} lack {lacking[0]} of the causal head, which would be drawn; "
                f"change model.options={self.options} (where it is to start as the embedding: model.untie=true), "
                "choose weights that have it, or give model.pretrained=false"
            )
        left = _without_place(model, report["unexpected_keys"], stack)
        if left:
            raise UserError(
                f"the weights of model.name={self.name} have {len(left)} tensors that a {type(model).__name__} of this "
                f"version of transformers has no place for, the first {left[0]}: it would not compute what they were "
                "trained for. Choose another model, or give model.pretrained=false"
            )

    def _config(self) -> PretrainedConfig:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, PretrainedConfig

        self.check()
        try:
            check_code(self.name, CONFIG, PretrainedConfig.get_config_dict(self.name)[0], self.trust_remote_code)
            found: Any = AutoConfig.from_pretrained(
                self.name, return_unused_kwargs=True, trust_remote_code=self.trust_remote_code, **self.options
            )
        except UserError:
            raise
        except (*BROKEN, OSError) as error:
            raise UserError(
                f"transformers found no model under model.name={self.name}: {first_line(error)}. {REMEDY}"
            ) from error
        except StrictDataclassError as error:
            raise UserError(f"model.options={self.options} does not fit model.name={self.name}: {error}") from error
        config, unknown = found
        if unknown:
            raise UserError(f"model.options has {', '.join(unknown)}, the config.json of {config.model_type} does not")
        with self._refusing(config.model_type):
            self._check_config(config)
        return config

    @abstractmethod
    def _check_config(self, config: PretrainedConfig) -> None:
        """Raises UserError for a configuration that no list of layers can hold, with the reason."""


def _without_place(model: PreTrainedModel, unexpected: Iterable[str], stack: LayerStack) -> list[str]:
    """Returns unexpected keys of the encoder itself, without heads and without blocks above the wanted ones."""
    from pipetransformer.models.huggingface_heads import find_base

    prefix, module = find_base(model)
    base, blocks = f"{prefix}.", _path_of_blocks(stack)
    parts = {name for name, _ in module.named_children()} - {"pooler"}
    buffers = {name for name, _ in model.named_buffers()}
    names = {base + key.removeprefix(base): key for key in unexpected}
    return sorted(
        key
        for name, key in names.items()
        if name.split(".")[1] in parts
        and name not in buffers
        and not name.endswith(NOT_RUN)
        and not (name.startswith(blocks) and int(name.removeprefix(blocks).split(".")[0]) >= stack.num_blocks)
    )


def _path_of_blocks(stack: LayerStack) -> str:
    """Returns what the names of all blocks begin with, up to their numbers."""
    first = next(iter(stack[1].by_name()))
    return re.split(r"(?<=\.)\d+\.", first)[0]


def _name_labels(config: PretrainedConfig, labels: Sequence[str]) -> None:
    """Replaces the labels that the configuration inherited; their number becomes ``num_labels``."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}


def _lacking(report: dict[str, Any]) -> set[str]:
    """Returns the keys that the pretrained weights lack, or have in another shape."""
    return {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}


def _quiet() -> None:
    """Silences progress bars and notes on the new head in every process; unusable weights raise an error."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def first_line(error: Exception) -> str:
    """Returns the message of an error in one line, with its type where that is not told."""
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return line if isinstance(error, OSError | ValueError) else f"{type(error).__name__} {line}"

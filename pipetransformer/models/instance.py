"""Stacks of models that a user made: an instance of timm, of transformers, or an ``nn.Sequential``.

The instance keeps its weights while the stack trains, as the source of the initial ones::

    stack_of(model)  ->  stack without storage; each rank loads the layers that it holds
    give_back(model, state), save_model(model, state, folder)  ->  the trained weights
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import save_file
from safetensors.torch import save_model as save_module
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.models.base import Head, ModelSpec
from pipetransformer.models.checks import beside_weights, where_padding_counts
from pipetransformer.models.layer import arguments, shallow_copy
from pipetransformer.models.stack import LayerStack, seeded, without_storage

SUPPORTED = (
    "timm's VisionTransformer and Eva, an encoder or decoder of transformers with a head, nn.Sequential and LayerStack"
)
RECOMPUTES = "it recomputes activations itself, with other dropout the second time; call {} and set parallel.recompute"


def stack_of(model: nn.Module) -> LayerStack:
    """Makes a stack without storage whose layers get the weights of an instance when they are loaded.

    Args:
        model: A VisionTransformer or Eva of timm, an encoder or decoder of transformers, an ``nn.Sequential`` or a
            LayerStack, with the head that is to be trained. It stays as it is.

    Raises:
        UserError: The model is of another kind, cannot be trained layer by layer, or has parameters without gradient,
            with hooks or expanded, or complex numbers.
    """
    _check_numbers(model)
    stack = _split(model).train()
    names = stack.names()
    stack.source = _StackWeights(model, names) if isinstance(model, LayerStack) else _InstanceWeights(model, names)
    return stack


def _check_numbers(model: nn.Module) -> None:
    """Refuses parameters and buffers of which copies on other devices would be something else."""
    fixed = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if fixed:
        raise UserError(
            f"{len(fixed)} parameters of the {type(model).__name__} take no gradient, the first {fixed[0]}; give "
            "requires_grad_(True), which layers are frozen is decided while training"
        )
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise UserError(
            f"{len(hooked)} parameters of the {type(model).__name__} have hooks of their own, the first {hooked[0]}, "
            "and the copies that train would not have them; take the hooks away"
        )
    numbers = [*model.named_parameters(), *model.named_buffers()]
    if imaginary := [name for name, each in numbers if each.is_complex()]:
        raise UserError(
            f"the {type(model).__name__} has {len(imaginary)} parameters and buffers of complex numbers, the first "
            f"{imaginary[0]}, which no precision of a run has; keep their two parts, by torch.view_as_real"
        )
    for name, parameter in model.named_parameters():
        if any(size > 1 and not step for size, step in zip(parameter.shape, parameter.stride(), strict=True)):
            raise UserError(
                f"the parameter {name} of the {type(model).__name__} was expanded: a number stands in several places; "
                "give it memory of its own, by clone()"
            )


def give_back(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copies trained weights, by their original names, into the instance that the stack was made of."""
    if not isinstance(model, LayerStack):
        model.load_state_dict(state)
        return
    for layer in (model[index] for index in range(len(model))):
        layer.module.load_state_dict({name: state[layer.prefix + name] for name in layer.module.state_dict()})


def save_model(model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
    """Writes trained weights as the model's library loads them; the instance gets them, too.

    Args:
        model: What the stack was made of.
        state: All tensors by their original names.
        folder: Gets model.safetensors, and config.json where the library has one: timm loads it by
            ``create_model("local-dir:<folder>", pretrained=True)``, transformers by ``from_pretrained(folder)``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, LayerStack):
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
        return
    give_back(model, state)
    if "timm" in _libraries(model):
        from timm.models import save_for_hf

        save_for_hf(model, str(folder), safe_serialization=True)
    elif "transformers" in _libraries(model):
        cast("Any", model).save_pretrained(folder)
    else:
        save_module(model, str(folder / "model.safetensors"))


class _InstanceWeights:
    """Gives each layer of a stack its tensors of an instance."""

    def __init__(self, model: nn.Module, names: list[list[str]]) -> None:
        self._model, self._names = model, names

    def __call__(self, index: int) -> Iterator[tuple[str, Tensor]]:
        tensors: dict[str, Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        tensors |= self._model.named_buffers(remove_duplicate=False)
        return ((name, tensors[name].detach()) for name in self._names[index])


class _StackWeights:
    """Gives each layer of a stack its tensors of the one that it is a copy of."""

    def __init__(self, model: LayerStack, names: list[list[str]]) -> None:
        self._model, self._names = model, names

    def __call__(self, index: int) -> Iterator[tuple[str, Tensor]]:
        own = self._names[index]
        return ((name, tensor.detach()) for name, tensor in self._model[index].tensors() if name in own)


def _split(model: nn.Module) -> LayerStack:
    """Checks the instance and returns its layers without storage."""
    libraries = _libraries(model)
    try:
        if "timm" in libraries:
            return _split_timm(model)
        if "transformers" in libraries:
            return _split_transformers(model)
        if isinstance(model, nn.Sequential):
            return LayerStack.from_sequential(without_storage(model))
        if isinstance(model, LayerStack):
            return _copied(model)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"a {type(model).__name__} cannot be trained layer by layer: {reason}") from error
    raise UserError(f"a {type(model).__name__} cannot be trained layer by layer; supported are {SUPPORTED}")


def _copied(model: LayerStack) -> LayerStack:
    """Returns a copy without storage, so that adapters, types and devices of a training leave the model alone."""
    found: dict[str, int] = {}
    for index in range(len(model)):
        for name in model[index].original_state():
            if found.setdefault(name, index) != index:
                raise UserError(
                    f"its layers {found[name]} and {index} both have {name}, and weights are kept by their names; give "
                    "each Layer a prefix of its own, as Layer(module, forward, 'blocks.0.')"
                )
    stack = shallow_copy(model)
    stack.layers = without_storage(model.layers)
    return stack


def _split_timm(model: nn.Module) -> LayerStack:
    from pipetransformer.models.timm import NAMES, why_not_flat
    from pipetransformer.models.timm_layers import FlatModel, check_instance, split_layers

    if not isinstance(model, FlatModel):
        raise UserError(f"it is a {type(model).__name__}{why_not_flat(model)}; {NAMES}")
    if getattr(model, "grad_checkpointing", False):
        raise UserError(RECOMPUTES.format("set_grad_checkpointing(False)"))
    idle = check_instance(model)
    stack = split_layers(without_storage(model))
    stack.note_idle(idle)
    return stack


def _split_transformers(model: nn.Module) -> LayerStack:
    from transformers import PreTrainedModel

    from pipetransformer.models.huggingface_layers import check_instance, check_runs_by_layers, split_layers

    if not isinstance(model, PreTrainedModel):
        raise UserError("supported are encoders of the usual shape and decoders, with a head")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise UserError(RECOMPUTES.format("gradient_checkpointing_disable()"))
    idle = check_instance(model)
    if getattr(model.config, "sliding_window", None):  # wider than the texts of that check
        with seeded(0):
            check_runs_by_layers(model)
    stack = split_layers(without_storage(model))
    stack.note_idle(idle)
    return stack


def _libraries(model: nn.Module) -> set[str]:
    """Top-level packages that the model's classes come from."""
    return {kind.__module__.partition(".")[0] for kind in type(model).__mro__}


@dataclass(frozen=True, kw_only=True)
class ModelInstance(ModelSpec):
    """A model that a script has made, where a configuration names one.

    Attributes:
        model: The user's model.
        stack: Its layers.
    """

    model: nn.Module
    stack: LayerStack

    modality: ClassVar[str] = "any"

    @classmethod
    def of(cls, model: nn.Module) -> "ModelInstance":
        """Splits a model into layers; see :func:`stack_of`."""
        return cls(name=type(model).__name__, model=model, stack=stack_of(model))

    @property
    def base_name(self) -> str:
        """The name or folder that transformers has loaded the model from; its class where there is none."""
        return getattr(getattr(self.model, "config", None), "_name_or_path", "") or self.name

    @property
    def padding_id(self) -> int | None:
        """The token by which the model itself finds the end of a text; ``None``: it looks at a mask alone."""
        if "transformers" not in _libraries(self.model):
            return None
        from pipetransformer.models.huggingface_layers import is_decoder, pools_last_token

        model = cast("Any", self.model)
        return model.config.pad_token_id if is_decoder(model) and pools_last_token(model) else None

    def check_on(self, inputs: Tensor, context: dict[str, Tensor]) -> None:
        """Checks a model that no library made on two samples; see :meth:`LayerStack.check`."""
        whole = LayerStack.from_sequential(self.model) if isinstance(self.model, nn.Sequential) else self.model
        if isinstance(whole, LayerStack):
            inputs, context = beside_weights(whole, inputs, context)
            self.stack.note_idle(whole.check(inputs, **context))
            if "attention_mask" in context:
                layers = [whole[index] for index in range(len(whole))]
                self.stack.padding_counts_in = where_padding_counts(layers, inputs, context)

    def check_names(self, split: str, names: Iterable[str]) -> None:
        """Refuses values of a sample that the model's own forward takes and its layers do not.

        Args:
            split: Name of the data set.
            names: Of all that its samples hold beside inputs and targets.

        Raises:
            UserError: With their names.
        """
        if isinstance(self.model, LayerStack):
            return
        own = arguments(self.model) | arguments(getattr(self.model, "base_model", self.model))
        taken = frozenset[str]().union(*(self.stack[index].arguments for index in range(len(self.stack))))
        if ignored := [name for name in names if name in own - taken]:
            raise UserError(
                f"the data set {split} has {', '.join(ignored)}, which {type(self.model).__name__} takes and its "
                "layers do not, so that it would train another model; leave it out"
            )

    def check_exists(self, timeout_s: float = 5.0) -> None:
        """Accepts the model: it is there."""

    def input_format(self) -> dict[str, Any]:
        return {}

    def build_meta(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        """Returns the stack; head and weights are those of the model."""
        return self.stack

    def output_shape(self, hidden: tuple[int, ...]) -> tuple[int, ...]:
        """Maps the shape (B, T, D) between layers to that of the head's output, by a run of the head without data."""
        head = copy.deepcopy(self.stack[len(self.stack) - 1]).to("meta")
        with torch.no_grad():
            return tuple(head(torch.empty(hidden, device="meta", dtype=_float_type(head))).shape)

    def save(self, stack: LayerStack, state: dict[str, Tensor], folder: Path) -> None:
        save_model(self.model, state, folder)


def _float_type(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())

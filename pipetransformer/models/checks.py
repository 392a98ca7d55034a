"""Checks that layers may run on a part of the batch, on any device, and still compute what the model computes.

A plan cuts the global batch into micro-batches and spreads it over replicas. That changes nothing only where a layer

* treats every sample by itself: the result of a batch is the results of its parts, side by side;
* keeps nothing from one training pass to the next: no buffer changes, as BatchNorm's running mean does.

Both show in a training pass over a few samples, without dropout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipetransformer.errors import UserError
from pipetransformer.models.layer import Layer

Context = Mapping[str, Tensor]
Forward = Callable[..., Tensor]
"""Runs a model: ``forward(inputs, **context)``."""


class _WithoutDropout(TorchFunctionMode):
    """Switches off dropout, attention dropout and stochastic depth.

    Attributes:
        rates: Of the dropout that would have been, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, torch.dropout):
            if _argument(args, kwargs, 2, "training", True):
                self._note(_argument(args, kwargs, 1, "p", 0.5))
            return args[0]
        if func is Tensor.bernoulli_:
            self._note(1 - _argument(args, kwargs, 1, "p", 0.5))
            return args[0].fill_(1)
        if func is F.scaled_dot_product_attention:
            self._note(_argument(args, kwargs, 4, "dropout_p", 0.0))
            kwargs["dropout_p"] = 0.0
            args = args[:4]  # dropout_p may be the fifth
        if func is F.multi_head_attention_forward:  # runs without this mode
            args = (*args[:10], 0.0, *args[11:])  # dropout_p
        return func(*args, **kwargs)

    def _note(self, rate: float) -> None:
        if rate:
            self.rates.append(float(rate))


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str, default: Any) -> Any:
    """Returns what a function is given by its place or its name."""
    return args[index] if len(args) > index else kwargs.get(name, default)


@torch.no_grad()
def check_layers(
    layers: Sequence[Layer], hidden_shape: torch.Size, inputs: Tensor, context: Context | None = None
) -> None:
    """Runs layers in training mode, on a batch and on its halves.

    Args:
        layers: All layers of a stack, with weights. Modes and buffers are restored.
        hidden_shape: Shape (B, T, D) of the tensor between layers for these inputs.
        inputs: At least two samples, images (B, C, H, W) or token ids (B, T).
        context: Tensors (B, ...) for every layer.

    Raises:
        UserError: A layer changes a buffer, mixes the samples of a batch, draws random numbers other than dropout's,
            or dropout at a rate that is not found, or gives another shape than (B, T, D).
    """
    context = context or {}
    with trial(nn.ModuleList(layers), training=True), _WithoutDropout() as without:
        x = inputs
        for index, layer in enumerate(layers):
            is_head = index == len(layers) - 1
            name = layer.prefix.removesuffix(".") or ("head" if is_head else "embedding")
            where = f"layer {index} ({name}, {type(layer.module).__name__})"
            without.rates.clear()
            outputs = _checked_for_buffers(layer, where, x, context)
            if without.rates and not may_draw_numbers(layer):
                raise UserError(
                    f"{where} draws dropout of rate {without.rates[0]:.3g} that no attribute tells, so it would depend "
                    "on the topology; use nn.Dropout, or keep the rate in an attribute with drop in its name"
                )
            if not is_head:
                _check_shape(where, outputs.shape, hidden_shape)
            _check_samples(layer, where, x, context, outputs)
            x = outputs


def may_draw_numbers(layer: nn.Module) -> bool:
    """Returns ``True`` when a layer may draw random numbers in training: a rate above 0 anywhere in it."""
    return any(
        isinstance(value, float) and value > 0
        for module in layer.modules()
        for name, value in vars(module).items()
        if name == "p" or "drop" in name
    )


@torch.no_grad()
def check_same_outputs(
    stack: nn.Module, model: nn.Module, forward: Forward, inputs: Tensor, context: Context | None = None
) -> None:
    """Compares a stack with the model that it was made of, in training and in evaluation mode, without dropout.

    Args:
        stack: All layers, with the model's own modules or copies of its weights.
        model: The model. Modes and buffers of both are restored.
        forward: Runs the model.
        inputs: A batch, (B, C, H, W) or token ids (B, T).
        context: Tensors (B, ...) for every layer. A mask should have a row of padding alone.

    Raises:
        UserError: They differ.
    """
    context = context or {}
    for mode in ("training", "evaluation"):
        is_training = mode == "training"
        with trial(stack, is_training), trial(model, is_training):
            with _WithoutDropout() as own:
                outputs = stack(inputs, **context)
            with _WithoutDropout() as wanted:
                expected = forward(inputs, **context)
        if outputs.shape != expected.shape or not close(outputs, expected):
            raise UserError(
                f"its layers, run one after the other, give other outputs than the model {_rows(outputs, expected)}in "
                f"{mode} mode"
            )
        if own.rates != wanted.rates:
            raise UserError(
                f"its layers, run one after the other, draw dropout {len(own.rates)} times in {mode} mode, and the "
                f"model {len(wanted.rates)} times or at other rates"
            )


def close(one: Tensor, other: Tensor) -> bool:
    """Compares up to rounding: half the digits of the dtype, relative to the largest absolute value."""
    tolerance = torch.finfo(other.dtype).eps ** 0.5 * float(other.nan_to_num().abs().max())
    return torch.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)


def _rows(outputs: Tensor, expected: Tensor) -> str:
    """Describes how outputs differ: the shapes, or how many samples where not all do."""
    if outputs.shape != expected.shape:
        return f"(shape {tuple(outputs.shape)} in place of {tuple(expected.shape)}) "
    differ = [row for row in range(len(expected)) if not close(outputs[row], expected[row])]
    return "" if len(differ) == len(expected) else f"for {len(differ)} of {len(expected)} samples "


def _checked_for_buffers(layer: Layer, where: str, x: Tensor, context: Context) -> Tensor:
    """Runs a layer and refuses it if the pass changed a buffer."""
    before = {name: buffer.clone() for name, buffer in layer.module.named_buffers()}
    outputs = layer(x, **context)
    for name, buffer in layer.module.named_buffers():
        if buffer.shape != before[name].shape or not torch.equal(buffer, before[name]):
            path, _, own = name.rpartition(".")
            kind, full = type(layer.module.get_submodule(path)).__name__, (layer.prefix + path).rstrip(".")
            raise UserError(
                f"{full or where} ({kind}) changes its buffer {own} in training, as statistics of a batch do, so it "
                "would train otherwise in micro-batches and on replicas; choose a model without"
            )
    return outputs


def _check_shape(where: str, shape: torch.Size, hidden_shape: torch.Size) -> None:
    if len(hidden_shape) != 3 or shape != hidden_shape:
        expected = tuple(hidden_shape) if len(hidden_shape) == 3 else "(batch, tokens, width)"
        raise UserError(f"{where} gives {tuple(shape)}; between layers every tensor has the shape {expected}")


def _check_samples(layer: Layer, where: str, x: Tensor, context: Context, outputs: Tensor) -> None:
    """Compares the outputs of a batch with those of a second pass and of its halves."""
    if not torch.allclose(outputs, layer(x, **context), rtol=0, atol=0, equal_nan=True):
        raise UserError(f"{where} draws random numbers that are not dropout's; they would depend on the topology")
    middle = len(x) // 2
    halves = slice(None, middle), slice(middle, None)
    try:
        parts = [layer(x[half], **{name: value[half] for name, value in context.items()}) for half in halves]
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{where} does not run on a part of a batch: {str(error).partition(chr(10))[0]}") from error
    if not close(torch.cat(parts), outputs):
        raise UserError(
            f"{where} mixes the samples of a batch, so it would train otherwise in micro-batches and on replicas; "
            "choose a model that treats every sample by itself"
        )


@contextmanager
def trial(model: nn.Module, training: bool) -> Iterator[None]:
    """Switches a model to a mode inside; restores its modes and buffers at the end."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for buffer, value in buffers:
            buffer.copy_(value)


def draw_all(model: nn.Module) -> None:
    """Randomizes all parameters, since initial weights of zero or one would hide differences."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                size = parameter[0].numel() if parameter.dim() > 1 else 4
                parameter.uniform_(-(size**-0.5), size**-0.5)

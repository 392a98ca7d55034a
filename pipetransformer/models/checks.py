"""Checks that layers may run on a part of the batch, on any device, and still compute what the model computes.

A plan cuts the global batch into micro-batches and spreads it over replicas. That changes nothing only where a layer

* treats every sample by itself: the result of a batch is the results of its parts, side by side;
* keeps nothing from one training pass to the next: no buffer changes, as BatchNorm's running mean does.

Both show in a training pass over a few samples, without dropout.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.models.layer import Layer
from pipetransformer.models.without_dropout import WithoutDropout

Context = Mapping[str, Tensor]
Forward = Callable[..., Tensor]
"""Runs a model: ``forward(inputs, **context)``."""
DRAWS = (
    "{} draws random numbers that are not dropout's, or by a function that it imports by its name; they would depend "
    "on the topology; use nn.Dropout, or torch.nn.functional.dropout by its whole name"
)
_BY_BATCH = {
    "max_norm": "changes weights by the rows of a micro-batch, so it would train otherwise at another topology",
    "scale_grad_by_freq": "counts the rows of a micro-batch, so it would train otherwise at another topology",
    "sparse": "gives sparse gradients, and those that are exchanged and clipped are dense",
}


@torch.no_grad()
def check_layers(
    layers: Sequence[Layer], hidden_shape: torch.Size, inputs: Tensor, context: Context | None = None
) -> set[str]:
    """Runs layers in training mode, on a batch and on its halves.

    Args:
        layers: All layers of a stack, with weights. Modes and buffers are restored.
        hidden_shape: Shape (B, T, D) of the tensor between layers for these inputs.
        inputs: At least two samples, images (B, C, H, W) or token ids (B, T).
        context: Tensors (B, ...) for every layer.

    Returns:
        The original names of parameters that get no gradient.

    Raises:
        UserError: A layer changes a buffer, a weight or its input, mixes the samples of a batch, also in the gradient
            of an embedding, draws random numbers other than dropout's, or dropout at a rate that is not found, or gives
            another shape than (B, T, D).
    """
    context = context or {}
    for layer in layers:
        _check_embeddings(layer)
    without_gradient: set[str] = set()
    with trial(nn.ModuleList(layers), training=True), WithoutDropout() as without:
        x = inputs
        for index, layer in enumerate(layers):
            is_head, where = index == len(layers) - 1, _place(layers, index)
            outputs = _checked_for_buffers(layer, where, x, context, without)
            if without.rates and not may_draw_numbers(layer):
                raise UserError(
                    f"{where} draws dropout of rate {without.rates[0]:.3g} that no attribute tells, so it would depend "
                    "on the topology; use nn.Dropout, or keep the rate in an attribute with drop in its name"
                )
            if not is_head:
                _check_shape(where, outputs.shape, hidden_shape)
            _check_samples(layer, where, x, context, outputs, without)
            without_gradient |= _without_gradient(layer, x, context)
            x = outputs
    return without_gradient


def beside_weights(
    model: nn.Module, inputs: Tensor, context: Context | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns inputs and context where the weights of a model are, and numbers in their type, as training has them."""
    weight = next((each for each in model.parameters() if each.is_floating_point()), None)
    if weight is None:
        return inputs, dict(context or {})
    inputs = inputs.to(weight.device, weight.dtype if inputs.is_floating_point() else inputs.dtype)
    return inputs, {name: values.to(weight.device) for name, values in (context or {}).items()}


def _place(layers: Sequence[Layer], index: int) -> str:
    """Returns number, name and class of a layer."""
    layer, is_head = layers[index], index == len(layers) - 1
    name = layer.prefix.removesuffix(".") or ("head" if is_head else "embedding")
    return f"layer {index} ({name}, {type(layer.module).__name__})"


@torch.no_grad()
def where_padding_counts(layers: Sequence[Layer], ids: Tensor, context: Context) -> str | None:
    """Finds the first layer that computes something else of a text where masked tokens follow it.

    Args:
        layers: All layers of a stack, with weights. Modes and buffers are restored.
        ids: Token ids (B, T). Their first half counts, since a model may take no more than T tokens.
        context: Tensors (B, T) for every layer.

    Returns:
        The layer, or ``None``: texts of different lengths may share a batch.
    """
    kept = max(1, ids.shape[1] // 2)
    alone, own = ids[:, :kept], {name: values[:, :kept] for name, values in context.items()}
    added = 0, max(1, ids.shape[1] - kept)
    padded, longer = F.pad(alone, added), {name: F.pad(values, added) for name, values in own.items()}
    with trial(nn.ModuleList(layers), training=True), WithoutDropout():
        for index, layer in enumerate(layers):
            try:
                alone, padded = layer(alone, **own), layer(padded, **longer)
            except Exception:  # whatever it raises: it takes texts of one length
                return _place(layers, index)
            found = padded if padded.shape == alone.shape else padded[:, :kept]
            if found.shape != alone.shape or not close(found, alone):
                return _place(layers, index)
    return None


def _without_gradient(layer: Layer, x: Tensor, context: Context) -> set[str]:
    """Returns the original names of a layer's parameters that take no part in its outputs."""
    named = {name: parameter for name, parameter in layer.by_name().items() if parameter.requires_grad}
    with torch.enable_grad():
        total = layer(x, **context).sum()
    if not total.requires_grad:
        return {*named}
    gradients = torch.autograd.grad(total, [*named.values()], allow_unused=True)
    return {name for name, gradient in zip(named, gradients, strict=True) if gradient is None}


def _check_embeddings(layer: Layer) -> None:
    """Refuses tables of which a pass changes or counts the rows that are in its batch."""
    for path, module in layer.module.named_modules():
        for option, reason in _BY_BATCH.items() if isinstance(module, nn.Embedding | nn.EmbeddingBag) else ():
            if value := getattr(module, option):
                name = f"{(layer.prefix + path).rstrip('.')} ({type(module).__name__})"
                raise UserError(f"{name} has {option}={value}, which {reason}; make it without {option}")


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
            with WithoutDropout() as own:
                outputs = stack(inputs, **context)
            with WithoutDropout() as wanted:
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


def _run(layer: Layer, where: str, x: Tensor, context: Context, without: WithoutDropout) -> Tensor:
    """Runs a layer and refuses it if it draws what the runtime does not draw by sample, or changes its input."""
    without.clear()
    before, version = _generators(), x._version
    weights = [parameter._version for parameter in layer.parameters()]
    outputs: Any = layer(x, **context)
    if not isinstance(outputs, Tensor):
        raise UserError(
            f"{where} returns a {type(outputs).__name__}, and one tensor goes from layer to layer; return that alone"
        )
    if _generators() != before:
        raise UserError(DRAWS.format(where))
    if x._version != version:
        raise UserError(
            f"{where} changes its input in place, which the stage below and recomputing still need; make it without "
            "inplace=True"
        )
    for (name, parameter), version in zip(layer.by_name().items(), weights, strict=True):
        if parameter._version != version:
            raise UserError(f"{where} changes its weight {name} in a forward pass; leave that to the optimizer")
    if others := [rows for rows in without.rows if rows != len(x)]:
        raise UserError(
            f"{where} gives dropout a tensor whose first dimension is {others[0]} and not the batch of {len(x)}, so "
            "its numbers would depend on the topology; keep samples first, and call nn.MultiheadAttention with "
            "batch_first=True and need_weights=False"
        )
    return outputs


def _generators() -> tuple[object, ...]:
    """Returns the states of the generators that a layer may draw from: torch's, NumPy's and Python's."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002 - the one that others draw from
    return torch.get_rng_state().numpy().tobytes(), of_numpy[1].tobytes(), of_numpy[2:], random.getstate()


def _checked_for_buffers(layer: Layer, where: str, x: Tensor, context: Context, without: WithoutDropout) -> Tensor:
    """Runs a layer and refuses it if the pass changed a buffer."""
    before = {name: buffer.clone() for name, buffer in layer.module.named_buffers()}
    outputs = _run(layer, where, x, context, without)
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


def _check_samples(
    layer: Layer, where: str, x: Tensor, context: Context, outputs: Tensor, without: WithoutDropout
) -> None:
    """Compares the outputs of a batch with those of a second pass and of its halves."""
    if not torch.allclose(outputs, layer(x, **context), rtol=0, atol=0, equal_nan=True):
        raise UserError(f"{DRAWS.format(where)}; or it keeps something from one pass to the next, as a count")
    middle = len(x) // 2
    halves = slice(None, middle), slice(middle, None)
    try:
        parts = [
            _run(layer, where, x[half], {name: value[half] for name, value in context.items()}, without)
            for half in halves
        ]
    except UserError:
        raise
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

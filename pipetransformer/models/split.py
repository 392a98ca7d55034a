"""The sizes of a model that a mesh has to divide, and the refusal of one that none can."""

from __future__ import annotations

from math import gcd

from torch import nn

from pipetransformer.errors import UserError
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack
from pipetransformer.models.tp_plan import WHOLE_PART, Part, TpPlan, check_columns, parts

HEADS = ("num_heads", "num_attention_heads", "n_heads")
WITHOUT_MESH = "run with parallel.tp=1 parallel.cp=1 parallel.dp_shard=1"


def split_widths(stack: LayerStack) -> dict[str, int]:
    """Returns the heads and the dimensions of matrices that a mesh divides, each size once, by a name of it.

    The head of the model stays whole.

    Raises:
        UserError: It has weights that layers share, or a layer, a parameter or a module that mixes columns has no rule.
    """
    if stack.ties:
        lowest, *copies = stack.ties[0]
        raise UserError(
            f"{copies[-1].name} of layer {copies[-1].layer} is {lowest.name} of layer {lowest.layer}, and a mesh "
            f"splits no weights that layers share; {WITHOUT_MESH}"
        )
    found: dict[str, int] = {}
    for layer in (stack[index] for index in range(len(stack) - 1)):
        check_columns(layer.module, tp_plan_of(layer))
        if counts := head_counts(layer):
            found["heads"] = gcd(*counts, found.get("heads", 0))
        for name, size in _sizes(layer):
            if size not in found.values():
                found[name] = size
    return found


def head_counts(layer: nn.Module) -> list[int]:
    """Returns the number of heads of each module of a layer that has some."""
    return [number for module in layer.modules() if (number := _heads(module)) is not None]


def _heads(module: nn.Module) -> int | None:
    numbers = (getattr(module, name, None) for name in HEADS)
    return next((number for number in numbers if isinstance(number, int)), None)


def _sizes(layer: Layer) -> list[tuple[str, int]]:
    """Returns the dimensions of a layer's matrices that are split, with the names of the parameters."""
    sizes: list[tuple[str, int]] = []
    for name, part in parts(layer.module, tp_plan_of(layer)).items():
        shape = layer.by_name()[layer.prefix + name].shape
        if part.style in ("colwise", "rowwise") and len(shape) > 1:
            sizes += [(name, shape[0] // part.groups), (name, shape[1])]
        elif part.style == "embedding":
            sizes.append((name, shape[1]))
    return sizes


def parts_of(layer: Layer, is_head: bool) -> dict[str, Part]:
    """Returns how a mesh splits each parameter of a layer, by original name.

    Args:
        is_head: The layer stays whole: it works on one token of each sample, or has a few columns.

    Raises:
        UserError: A parameter has no rule.
    """
    if is_head:
        return dict.fromkeys(layer.by_name(), WHOLE_PART)
    return {layer.prefix + name: part for name, part in parts(layer.module, tp_plan_of(layer)).items()}


def tp_plan_of(layer: Layer) -> TpPlan:
    """Returns how a layer is split.

    Raises:
        UserError: Nothing says it.
    """
    if layer.tp_plan is None:
        raise UserError(
            f"no tp_plan says how {type(layer.module).__name__} is split; {WITHOUT_MESH}, or give its layer a tp_plan"
        )
    return layer.tp_plan

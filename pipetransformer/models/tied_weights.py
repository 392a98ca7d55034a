"""Parameters that several layers share, such as an output matrix that is the word embeddings.

The layers may end up on different devices. So each gets its own copy, and the stack records which copies are one
parameter: they start equal, and the runtime keeps them equal::

    original     embeddings.weight   is   decoder.weight
    stack        layer 0             =    layer L + 1
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from pipetransformer.errors import UserError
from pipetransformer.models.layer import Layer, Module, shallow_copy


class ParamRef(NamedTuple):
    """A layer's index and the original name of one of its parameters."""

    layer: int
    name: str


Tie = tuple[ParamRef, ...]
"""The copies of a shared parameter, the lowest layer first."""


def untie(layers: Sequence[Layer]) -> tuple[Tie, ...]:
    """Replaces each parameter that a lower layer also has by a copy.

    Returns:
        The copies of each shared parameter.

    Raises:
        UserError: A layer shares all its parameters, so nothing of it could train while the lower layer is frozen.
    """
    places: dict[nn.Parameter, list[ParamRef]] = {}
    for index, layer in enumerate(layers):
        own = dict(layer.module.named_parameters())
        copies = {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in own.values() if p in places}
        if copies and len(copies) == len(own):
            raise UserError(
                f"layer {index} of {len(layers)} shares all its {len(own)} parameters with lower layers; supported are "
                "models whose layers share a part of their parameters"
            )
        for name, parameter in own.items():
            places.setdefault(parameter, []).append(ParamRef(index, layer.prefix + name))
        if copies:
            layer.module = _with_copies(layer.module, copies)
    return tuple(tuple(tie) for tie in places.values() if len(tie) > 1)


def _with_copies(module: Module, copies: dict[nn.Parameter, nn.Parameter]) -> Module:
    """Returns a shallow copy with other parameters, its children too: they may belong to another layer as well."""
    twin = shallow_copy(module)
    twin._parameters.update({name: copies.get(p, p) for name, p in twin._parameters.items() if p is not None})
    for name, child in module._modules.items():
        if child is not None and not copies.keys().isdisjoint(child.parameters()):
            twin._modules[name] = _with_copies(child, copies)
    return twin

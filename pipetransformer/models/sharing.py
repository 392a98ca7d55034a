"""Parameters that several layers share, such as an output matrix that is the word embeddings.

The layers may come to lie on different devices. So each gets a parameter of its own, and the stack remembers which of
them are one: they start alike, and the runtime keeps them so::

    original     embeddings.weight   is   decoder.weight
    stack        layer 0             =    layer L + 1
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torch import nn

if TYPE_CHECKING:
    from pipetransformer.models.stack import Layer

Module = TypeVar("Module", bound=nn.Module)


class Place(NamedTuple):
    """A layer, and the original name of one of its parameters."""

    layer: int
    name: str


Tie = tuple[Place, ...]
"""Where a shared parameter is, the lowest layer first."""


def shallow_copy(module: Module) -> Module:
    """A copy with the same parameters and children, from which parts can be taken without touching the original."""
    twin = copy.copy(module)
    for parts in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[parts] = dict(twin.__dict__[parts])
    return twin


def aliases(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that a module has under several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [own for own in names.values() if len(own) > 1]


def separate(layers: Sequence[Layer]) -> tuple[Tie, ...]:
    """Gives a layer a parameter of its own in place of each that a lower layer has, too.

    Raises:
        ValueError: A layer shares all it has, and so has nothing that could train while the lower layer is frozen.
    """
    places: dict[nn.Parameter, list[Place]] = {}
    for index, layer in enumerate(layers):
        own = dict(layer.module.named_parameters())
        copies = {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in own.values() if p in places}
        if copies and len(copies) == len(own):
            raise ValueError(
                f"layer {index} of {len(layers)} shares all its {len(own)} parameters with lower layers; supported are "
                "models whose layers share a part of their parameters"
            )
        for name, parameter in own.items():
            places.setdefault(parameter, []).append(Place(index, layer.prefix + name))
        if copies:
            layer.module = _with_copies(layer.module, copies)
    return tuple(tuple(tie) for tie in places.values() if len(tie) > 1)


def _with_copies(module: Module, copies: dict[nn.Parameter, nn.Parameter]) -> Module:
    """A shallow copy with other parameters; so are the children that have them, which may be another layer's, too."""
    twin = shallow_copy(module)
    twin._parameters.update({name: copies.get(p, p) for name, p in twin._parameters.items() if p is not None})
    for name, child in module._modules.items():
        if child is not None and not copies.keys().isdisjoint(child.parameters()):
            twin._modules[name] = _with_copies(child, copies)
    return twin

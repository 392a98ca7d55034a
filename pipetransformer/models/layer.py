"""One layer of a stack: the original module, and how to call it."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from inspect import signature
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.mesh import Box
from pipetransformer.models.tp_plan import Part, TpPlan

Forward = Callable[..., Tensor]
"""Calls a layer's module: ``forward(module, x, **context) -> Tensor``."""
Module = TypeVar("Module", bound=nn.Module)
FROM_SOURCE = "a stack's source yields for a layer each tensor of stack.names()[index] once, whole"


class Layer(nn.Module):
    """One entry of a stack: the original module and how to call it.

    Args:
        module: The original module, or a shallow copy of the original model reduced to this layer's part.
        forward: Calls it: ``forward(module, x, **context) -> Tensor``. Takes what it needs of the context and ignores
            the rest.
        prefix: The module's path in the original model, with a trailing dot, or empty.
        tp_plan: How the ranks of a mesh split its parameters; ``None``: they cannot, or each has them whole (a head).

    Attributes:
        cuts: The part and the box of each parameter that this rank has in part, by original name.
        whole_shapes: The shapes of these parameters in one piece.
    """

    def __init__(self, module: nn.Module, forward: Forward, prefix: str = "", tp_plan: TpPlan | None = None) -> None:
        super().__init__()
        self.module = module
        self.prefix = prefix
        self.tp_plan = tp_plan
        self.cuts: dict[str, tuple[Part, Box]] = {}
        self.whole_shapes: dict[str, torch.Size] = {}
        self._forward = forward
        self._aliases = aliases(module)

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        return self._forward(self.module, x, **context)

    @property
    def arguments(self) -> frozenset[str]:
        """Names of the context tensors that the layer takes, beside those of its module and input."""
        return frozenset(signature(self._forward).parameters)

    def by_name(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by their original names."""
        return {self.prefix + name: parameter for name, parameter in self.module.named_parameters()}

    def original_name(self, own: str) -> str:
        """Returns the original name of a tensor that ``named_parameters`` or ``named_buffers`` of the layer name."""
        return self.prefix + own.removeprefix("module.")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields parameters and buffers, non-persistent ones included, each under one of its original names."""
        for name, parameter in self.module.named_parameters():  # one by one: some readers stop at the first
            yield self.prefix + name, parameter
        for name, buffer in self.module.named_buffers():
            yield self.prefix + name, buffer

    def shapes(self) -> dict[str, torch.Size]:
        """Returns the shapes of :meth:`tensors` in one piece, also where this rank has them in part."""
        return {name: tensor.shape for name, tensor in self.tensors()} | self.whole_shapes

    def types(self) -> dict[str, torch.dtype]:
        """Returns the types of :meth:`tensors`."""
        return {name: tensor.dtype for name, tensor in self.tensors()}

    def take_form(self, other: Self) -> None:
        """Takes the module of another form of the same layer, whole or a part, with what it has of each parameter."""
        self.module, self.cuts, self.whole_shapes = other.module, other.cuts, other.whole_shapes
        self.refresh_aliases()

    def refresh_aliases(self) -> None:
        """Looks again for parameters under several names, after a change of the module."""
        self._aliases = aliases(self.module)

    def alias_names(self) -> dict[str, str]:
        """Returns the further original names of parameters, and for each the one that :meth:`tensors` has."""
        return {self.prefix + other: self.prefix + first for first, *others in self._aliases for other in others}

    @property
    def has_storage(self) -> bool:
        """False while the layer is on the meta device."""
        return all(not tensor.is_meta for _, tensor in self.tensors())

    def fill(self, values: Iterable[tuple[str, Tensor]], device: torch.device | str) -> None:
        """Allocates a layer without storage and copies its tensors into it, as :meth:`copy_from` does."""
        self.to_empty(device=device)
        self.copy_from(values)

    @torch.no_grad()
    def copy_from(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors into a layer that has storage, converted to the layer's dtypes.

        Args:
            values: Whole tensors by original name, of which a sharded layer takes its part.

        Raises:
            UserError: The values are not those of the layer's tensors.
        """
        missing = dict(self.tensors())
        for name, value in values:
            own, part = missing.pop(name, None), self.own_part(name, value)
            if own is None:
                raise UserError(f"{name} is no tensor of this layer, or comes twice; {FROM_SOURCE}")
            if own.shape != part.shape:  # torch would repeat a smaller one
                shapes = f"{tuple(part.shape)}, and the layer's {tuple(own.shape)}"
                raise UserError(f"the initial {name} has shape {shapes}; {FROM_SOURCE}")
            own.copy_(part)
        if missing:
            raise UserError(f"the initial {', '.join(sorted(missing))} are missing; {FROM_SOURCE}")

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's part of a parameter, or of a tensor of its shape; the whole of it without a mesh."""
        if name not in self.cuts or not whole.ndim:
            return whole
        part, box = self.cuts[name]
        return part.cut(whole, box)

    def original_state(self) -> dict[str, Tensor]:
        """Returns the layer's part of the original model's ``state_dict``."""
        return {self.prefix + name: tensor for name, tensor in self.module.state_dict().items()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Restores aliases: to and from the meta device torch makes a new parameter for each name."""
        super()._apply(fn, recurse)
        for first, *others in self._aliases:
            for path, _, name in (other.rpartition(".") for other in others):
                setattr(self.module.get_submodule(path), name, self.module.get_parameter(first))
        return self


def arguments(module: nn.Module) -> frozenset[str]:
    """Returns the names of the arguments of a module's forward."""
    return _arguments(type(module).forward)


@cache
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(forward).parameters) - {"self"}


def deep_copy(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """Returns a copy with tensors of its own, in half of the time that :func:`copy.deepcopy` takes.

    Args:
        module: Any module. Each has a dozen tables of hooks, and taking empty ones apart is most of what it does.
        memo: What stands for parts of the module in the copy, by their ``id``.
    """
    memo = {} if memo is None else memo
    for each in module.modules():
        tables = (table for table in vars(each).values() if type(table) is OrderedDict and not table)
        memo |= {id(table): OrderedDict() for table in tables if id(table) not in memo}
    return copy.deepcopy(module, memo)


def shallow_copy(module: Module) -> Module:
    """Returns a copy with the same parameters and children, from which parts can be removed safely."""
    twin = copy.copy(module)
    for parts in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[parts] = dict(twin.__dict__[parts])
    return twin


def aliases(module: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter that a module has under several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [own for own in names.values() if len(own) > 1]

"""Counts what autograd keeps of a layer between forward and backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Finds the copies of a layer's weights that autocast makes inside.

    Attributes:
        bytes_at: Size of each copy by its address.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._weights = _addresses(layer)
        self.bytes_at: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() in self._weights:
            storage = output.untyped_storage()
            self.bytes_at[storage.data_ptr()] = storage.nbytes()
        return output


@contextmanager
def count_saved(layer: nn.Module, casts: Casts) -> Iterator[list[int]]:
    """Bytes that autograd keeps for backward inside, each storage once, without the parameters and their casts."""
    own = _addresses(layer) | casts.bytes_at.keys()
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    total = [0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total[0] = sum(storages.values())


def _addresses(layer: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in layer.parameters()}

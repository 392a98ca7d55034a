"""Counts bytes of tensors: those that autograd saves, copies of weights by autocast, and all that live."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AutocastCopies(TorchDispatchMode):
    """Finds the copies of a layer's weights that autocast makes inside.

    Attributes:
        bytes_at: Bytes of each copy by its address.
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


class SavedBytes:
    """Counts the bytes that are kept for backward: each storage once, without parameters and their copies.

    Args:
        layer: Has the parameters.
        copies: Those of autocast.
    """

    def __init__(self, layer: nn.Module, copies: AutocastCopies) -> None:
        self._own = _addresses(layer) | copies.bytes_at.keys()
        self._storages: dict[int, int] = {}

    @property
    def total(self) -> int:
        """The bytes so far."""
        return sum(self._storages.values())

    def add(self, tensor: Tensor) -> Tensor:
        """Counts a tensor and returns it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @contextmanager
    def of_autograd(self) -> Iterator[None]:
        """Counts what autograd saves inside."""
        with torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor):
            yield


def _addresses(layer: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in layer.parameters()}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations return inside, on any device; each storage once, until it is freed.

    Attributes:
        now: Bytes that live.
        peak: The most bytes that lived at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor, if its storage is not counted yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # the same behind all views; the data pointer changes when FSDP resizes the storage
        if tensor.is_meta or key in self._known:
            return
        num_bytes = storage.nbytes()

        def freed(_: object) -> None:
            del self._known[key]
            self.now -= num_bytes

        self._known[key] = weakref.ref(storage, freed)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result


def peak_forward_bytes(layer: nn.Module, forward: Callable[[], object], inputs: Iterable[Tensor]) -> int:
    """Measures the most bytes that a forward pass allocates at a time when the layer is frozen.

    Args:
        forward: Runs the layer, which is left in training mode.
        inputs: Tensors that live before.
    """
    layer.eval()
    with torch.no_grad(), LiveBytes() as live:
        for tensor in (*layer.parameters(), *layer.buffers(), *inputs):
            live.add(tensor)
        num_bytes = live.now
        forward()
    layer.train()
    return live.peak - num_bytes


def peak_backward_bytes(layer: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, wants_grad: bool) -> int:
    """Measures the most bytes that a backward pass allocates at a time.

    Args:
        layer: Its parameters have gradients already, as after the first micro-batch: a new one is added to those.
        forward: Runs the layer.
        x: The input.
        wants_grad: The input takes a gradient.
    """
    with LiveBytes() as live:
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            live.add(parameter)
        output = forward(x.detach().requires_grad_(wants_grad))
        num_bytes = live.peak = live.now
        if output.requires_grad:
            output.backward(torch.ones_like(output))
    layer.zero_grad(set_to_none=True)
    return live.peak - num_bytes


def peak_update_bytes(update: Callable[[], object]) -> int:
    """Measures the most bytes that an update of parameters allocates at a time, besides what it leaves."""
    with LiveBytes() as live:
        update()  # makes known what is there before and after
        num_bytes = live.peak = live.now
        update()
    return live.peak - num_bytes


@dataclass(frozen=True)
class Kept:
    """Bytes that a layer takes for one batch."""

    activation_bytes: int
    loss_bytes: int
    output_bytes: int
    peak_forward_bytes: int


def kept_of(num_samples: int, one: Kept, two: Kept) -> Kept:
    """Returns the bytes for as many equal samples as a line through those for one and for two of them tells."""
    pairs = zip(astuple(one), astuple(two), strict=True)
    return Kept(*(of_one + (num_samples - 1) * (of_two - of_one) for of_one, of_two in pairs))

"""What a rank holds: its layers with their optimizer state; every other layer is a shape on the meta device."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipetransformer.models.stack import Layer, LayerStack

Manifest = tuple[tuple[str, str, torch.Size, torch.dtype], ...]
OptimizerState = dict[str, dict[str, Tensor]]


class ResidentLayers:
    """The layers of a rank.

    Attributes:
        stack: The whole model; layers that are not held have no storage.
        optimizer_state: For each held layer the optimizer's tensors by parameter name and key, between two optimizers.
    """

    def __init__(self, stack: LayerStack, device: torch.device) -> None:
        self.stack, self.device = stack, device
        self.optimizer_state: dict[int, OptimizerState] = {}

    def holds(self, layer: int) -> bool:
        return self.stack[layer].has_storage

    def held(self) -> list[int]:
        return [layer for layer in range(len(self.stack)) if self.holds(layer)]

    def load(self, layers: Iterable[int]) -> None:
        """Makes layers held, with their initial weights."""
        for layer in layers:
            self.stack.load(layer, self.device)

    def keep(self, layers: Iterable[int], offloaded: Iterable[int] = ()) -> None:
        """Gives back every other layer; parked ones wait in host memory."""
        layers, offloaded = set(layers), set(offloaded)
        for index in range(len(self.stack)):
            if index not in layers | offloaded:
                self.stack[index].to("meta")
                self.optimizer_state.pop(index, None)
            elif self.holds(index):
                self.stack[index].to("cpu" if index in offloaded else self.device)

    def stash_optimizer_state(self, optimizer: Optimizer | None, first_active: int) -> None:
        """Moves the optimizer's tensors of what trains on to ``optimizer_state``; the rest is dropped."""
        self.optimizer_state.clear()
        if optimizer is None:
            return
        for index in self.held():
            if index >= first_active:
                kept = optimizer.state.keys() & set(self.stack.trainable(index, first_active))
                named = self.stack[index].named_parameters()
                self.optimizer_state[index] = {name: dict(optimizer.state[p]) for name, p in named if p in kept}

    def restore_optimizer_state(self, optimizer: Optimizer | None) -> None:
        """Hands the tensors to a new optimizer over the same layers."""
        if optimizer is not None:
            for index, state in self.optimizer_state.items():
                parameters = dict(self.stack[index].named_parameters())
                for name, tensors in state.items():
                    optimizer.state[parameters[name]] = dict(tensors)
        self.optimizer_state.clear()

    def manifest(self, layer: int) -> Manifest:
        """Names, shapes and types of a held layer's tensors in the order of :meth:`pack`."""
        return tuple((name, key, tensor.shape, tensor.dtype) for name, key, tensor in self._tensors(layer))

    def pack(self, layer: int) -> Tensor:
        """All tensors of a held layer as one run of bytes."""
        with torch.no_grad():
            return torch.cat([_as_bytes(tensor, self.device) for _, _, tensor in self._tensors(layer)])

    def unpack(self, layer: int, manifest: Manifest, data: Tensor) -> None:
        """Makes a layer held, with the tensors that :meth:`pack` wrote on another rank."""
        module = self.stack[layer]
        if not self.holds(layer):
            module.to_empty(device=self.device)
        own = dict(_module_tensors(module))
        state: OptimizerState = {}
        start = 0
        for name, key, shape, dtype in manifest:
            num_bytes = shape.numel() * dtype.itemsize
            tensor = data[start : start + num_bytes].clone().view(dtype).reshape(shape)
            start += num_bytes
            if key:
                # A step count is a scalar and stays on the host, as torch's optimizers make it.
                state.setdefault(name, {})[key] = tensor if shape else tensor.cpu()
            else:
                with torch.no_grad():
                    own[name].copy_(tensor)
        if state:
            self.optimizer_state[layer] = state

    def _tensors(self, layer: int) -> Iterable[tuple[str, str, Tensor]]:
        for name, tensor in _module_tensors(self.stack[layer]):
            yield name, "", tensor
        for name, tensors in self.optimizer_state.get(layer, {}).items():
            for key, tensor in tensors.items():
                yield name, key, tensor


def _module_tensors(module: Layer) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _as_bytes(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)

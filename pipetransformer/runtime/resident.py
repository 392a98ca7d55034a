"""The layers that a rank holds, with their optimizer state; every other layer is a shape on the meta device."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipetransformer.models.stack import Layer, LayerStack

Manifest = tuple[tuple[str, str, torch.Size, torch.dtype], ...]
OptimizerState = dict[str, dict[str, Tensor]]
REFERENCE = "reference"
"""Key of earlier weights that lie in host memory beside the optimizer state, to be compared with."""


class ResidentLayers:
    """The layers of a rank.

    Args:
        stack: The whole model.
        device: The device that the rank computes on.

    Attributes:
        stack: The whole model; layers that the rank does not hold have no storage.
        optimizer_state: For each held layer the optimizer's tensors by parameter name and key, between two optimizers.
    """

    def __init__(self, stack: LayerStack, device: torch.device) -> None:
        self.stack, self.device = stack, device
        self.optimizer_state: dict[int, OptimizerState] = {}

    def holds(self, layer: int) -> bool:
        """Returns ``True`` when a layer has storage on this rank."""
        return self.stack[layer].has_storage

    def held(self) -> list[int]:
        """Returns the layers that have storage on this rank, ascending."""
        return [layer for layer in range(len(self.stack)) if self.holds(layer)]

    def load(self, layers: Iterable[int]) -> None:
        """Gives layers their initial weights on the device."""
        for layer in layers:
            self.stack.load(layer, self.device)

    def keep(self, layers: Iterable[int], offloaded: Iterable[int] = ()) -> None:
        """Frees every other layer; offloaded ones stay in host memory."""
        layers, offloaded = set(layers), set(offloaded)
        for index in range(len(self.stack)):
            if index not in layers | offloaded:
                self.stack[index].to("meta")
                self.optimizer_state.pop(index, None)
            elif self.holds(index):
                self.stack[index].to("cpu" if index in offloaded else self.device)

    def stash_optimizer_state(self, optimizer: Optimizer | None, first_active: int) -> None:
        """Moves the optimizer's tensors of weights that train on to ``optimizer_state``, and drops the others.

        Args:
            optimizer: The optimizer of the plan before; ``None`` without active parameters.
            first_active: The first layer that takes a gradient in the next plan.
        """
        self.optimizer_state.clear()
        if optimizer is None:
            return
        for index in self.held():
            if index >= first_active:
                kept = optimizer.state.keys() & set(self.stack.trainable(index, first_active))
                named = self.stack[index].named_parameters()
                self.optimizer_state[index] = {name: dict(optimizer.state[p]) for name, p in named if p in kept}

    def restore_optimizer_state(self, optimizer: Optimizer | None) -> None:
        """Moves the tensors to a new optimizer over the same layers."""
        if optimizer is not None:
            for index, state in self.optimizer_state.items():
                parameters = dict(self.stack[index].named_parameters())
                for name, tensors in state.items():
                    optimizer.state[parameters[name]] = dict(tensors)
        self.optimizer_state.clear()

    def manifest(self, layer: int) -> Manifest:
        """Returns names, shapes and types of a held layer's tensors in the order of :meth:`pack`."""
        return tuple((name, key, tensor.shape, tensor.dtype) for name, key, tensor in self._tensors(layer))

    def pack(self, layer: int) -> Tensor:
        """Returns all tensors of a held layer as one tensor of bytes (num_bytes,)."""
        with torch.no_grad():
            return torch.cat([_as_bytes(tensor, self.device) for _, _, tensor in self._tensors(layer)])

    def unpack(self, layer: int, manifest: Manifest, data: Tensor) -> None:
        """Fills a layer with the tensors that :meth:`pack` packed on another rank.

        Args:
            layer: The layer, held or not.
            manifest: From the other rank's :meth:`manifest`.
            data: Bytes (num_bytes,).
        """
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
                state.setdefault(name, {})[key] = tensor if shape and key != REFERENCE else tensor.cpu()
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

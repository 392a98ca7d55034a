"""The layers that a rank holds, with their optimizer state; every other layer is a shape on the meta device.

Where a run may unfreeze, the optimizer state of frozen weights waits in host memory of each rank that holds them. It
moves with its layer, and goes to the next optimizer when the layer trains again.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from pipetransformer.host_copies import HostCopies, to_device
from pipetransformer.models.stack import Layer, LayerStack
from pipetransformer.optim.fused import place_state
from pipetransformer.runtime.cuts import LayerCuts

Manifest = tuple[tuple[str, str, torch.Size, torch.dtype], ...]
OptimizerState = dict[str, dict[str, Tensor]]
REFERENCE = "reference"
"""Key of earlier weights that lie in host memory beside the optimizer state, to be compared with."""


class ResidentLayers:
    """The layers of a rank.

    Args:
        stack: The whole model.
        device: The device that the rank computes on.
        parks: Optimizer state of frozen weights is parked in host memory; otherwise it is dropped.

    Attributes:
        stack: The whole model; layers that the rank does not hold have no storage.
        optimizer_state: For each held layer the optimizer's tensors by parameter name and key: between two optimizers
            those of all weights, and while one runs the parked ones.
        cuts: Which layers are whole, and of which ranks of a mesh have parts.
        home: Where the layers lie that the rank runs: on its device, or in host memory where they come in chunks.
    """

    def __init__(self, stack: LayerStack, device: torch.device, parks: bool = False) -> None:
        self.stack, self.device, self.parks = stack, device, parks
        self.optimizer_state: dict[int, OptimizerState] = {}
        self.cuts, self.home = LayerCuts(stack), device

    def own_state(self, layer: int, whole: OptimizerState) -> OptimizerState:
        """Returns this rank's part of whole optimizer state by the names of a layer's own parameters."""
        module = self.stack[layer]
        if not module.cuts:
            return whole
        return {
            own: {key: module.own_part(module.original_name(own), value).clone() for key, value in tensors.items()}
            for own, tensors in whole.items()
        }

    def holds(self, layer: int) -> bool:
        """Returns ``True`` when a layer has storage on this rank."""
        return self.stack[layer].has_storage

    def held(self) -> list[int]:
        """Returns the layers that have storage on this rank, ascending."""
        return [layer for layer in range(len(self.stack)) if self.holds(layer)]

    def load(self, layers: Iterable[int]) -> None:
        """Gives layers their initial weights."""
        for layer in layers:
            self.stack.load(layer, self.home)

    def keep(self, layers: Iterable[int], offloaded: Iterable[int] = ()) -> None:
        """Frees every other layer; offloaded ones stay in host memory."""
        layers, offloaded = set(layers), set(offloaded)
        for index in range(len(self.stack)):
            if index not in layers | offloaded:
                self.stack[index].to("meta")
                self.optimizer_state.pop(index, None)
            elif self.holds(index):
                self.stack[index].to("cpu" if index in offloaded else self.home)

    def stash_optimizer_state(self, optimizer: Optimizer | None, first_active: int) -> None:
        """Moves the optimizer's tensors to ``optimizer_state``; drops those of weights that freeze, unless it parks.

        Args:
            optimizer: The optimizer of the plan before; ``None`` without active parameters.
            first_active: The first layer that takes a gradient in the next plan.
        """
        if optimizer is None:
            return
        for index in self.held():
            kept = optimizer.state.keys() & set(self._kept(index, first_active))
            named = self.stack[index].named_parameters()
            state = {name: dict(optimizer.state[p]) for name, p in named if p in kept}
            if state:
                self.optimizer_state[index] = self.optimizer_state.get(index, {}) | state

    def _kept(self, layer: int, first_active: int) -> Iterable[Parameter]:
        return self.stack[layer].parameters() if self.parks else self.stack.trainable(layer, first_active)

    def restore_optimizer_state(self, optimizer: Optimizer | None, first_active: int) -> None:
        """Moves the tensors of weights that train to a new optimizer; the others are parked, or dropped.

        Args:
            optimizer: The optimizer over the active layers that this rank runs; ``None`` without active parameters.
            first_active: The first layer that takes a gradient.
        """
        parked, host = dict[int, OptimizerState](), HostCopies(self.device)
        for index, state in self.optimizer_state.items():
            training, parameters = set(self.stack.trainable(index, first_active)), self._parameters(index)
            going_on = {name: tensors for name, tensors in state.items() if parameters[name] in training}
            if optimizer is not None:
                for name, tensors in on_device(going_on, self.home).items():
                    optimizer.state[parameters[name]] = place_state(optimizer, tensors, self.home)
            frozen = {name: tensors for name, tensors in state.items() if name not in going_on}
            if self.parks and frozen:
                parked[index] = {name: {key: host.move(t) for key, t in own.items()} for name, own in frozen.items()}
        host.wait()
        self.optimizer_state = parked

    def parked(self) -> dict[Tensor, dict[str, Tensor]]:
        """Returns the parked optimizer state by parameter."""
        return {
            self._parameters(index)[name]: tensors
            for index, state in self.optimizer_state.items()
            for name, tensors in state.items()
        }

    def _parameters(self, layer: int) -> dict[str, Parameter]:
        return dict(self.stack[layer].named_parameters())

    def manifest(self, layer: int, with_state: bool = True) -> Manifest:
        """Returns names, shapes and types of a held layer's tensors in the order of :meth:`pack`.

        Args:
            with_state: Optimizer state counts; a layer that is only borrowed comes without it.
        """
        return tuple((name, key, tensor.shape, tensor.dtype) for name, key, tensor in self.tensors(layer, with_state))

    def pack(self, layer: int, with_state: bool = True) -> Tensor:
        """Returns the tensors of a held layer's :meth:`manifest` as one tensor of bytes (num_bytes,)."""
        return as_bytes((tensor for *_, tensor in self.tensors(layer, with_state)), self.device)

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
        tensors = from_bytes(data, [(shape, dtype) for *_, shape, dtype in manifest])
        for (name, key, shape, _), tensor in zip(manifest, tensors, strict=True):
            if key:
                # A step count is a scalar and stays on the host, as torch's optimizers make it.
                state.setdefault(name, {})[key] = tensor if shape and key != REFERENCE else tensor.cpu()
            else:
                with torch.no_grad():
                    own[name].copy_(tensor)
        if state:
            self.optimizer_state[layer] = state

    def tensors(self, layer: int, with_state: bool = True) -> Iterator[tuple[str, str, Tensor]]:
        """Yields the tensors of a held layer by own name, with the key of optimizer state or nothing."""
        for name, tensor in _module_tensors(self.stack[layer]):
            yield name, "", tensor
        state = self.optimizer_state.get(layer, {}) if with_state else {}
        for name in sorted(state):  # alike on all ranks that send the layer; a file gives them in any order
            for key in sorted(state[name]):
                yield name, key, state[name][key]


def _module_tensors(module: Layer) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def on_device(state: OptimizerState, device: torch.device) -> OptimizerState:
    """Returns optimizer state on a device; step counts and references where they are."""
    return {
        name: {key: to_device(t, device) if t.ndim and key != REFERENCE else t for key, t in tensors.items()}
        for name, tensors in state.items()
    }


@torch.no_grad()
def as_bytes(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the numbers of tensors one after another on a device as bytes (num_bytes,)."""
    nothing = torch.empty(0, dtype=torch.uint8, device=device)  # a layer may have no tensors
    return torch.cat([nothing, *(each.to(device).contiguous().reshape(-1).view(torch.uint8) for each in tensors)])


def from_bytes(data: Tensor, forms: Iterable[tuple[torch.Size, torch.dtype]]) -> Iterator[Tensor]:
    """Yields copies of the tensors of these shapes and types that :func:`as_bytes` has joined."""
    start = 0
    for shape, dtype in forms:
        num_bytes = shape.numel() * dtype.itemsize
        yield data[start : start + num_bytes].clone().view(dtype).reshape(shape)
        start += num_bytes

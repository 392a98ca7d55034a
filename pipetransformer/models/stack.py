"""A model as a flat list of layers, with the original names of its parameters."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Run = Callable[..., Tensor]
Source = Callable[[int], Iterable[tuple[str, Tensor]]]
"""Gives the initial tensors of a layer one by one, with their original names; the same on every process."""
Module = TypeVar("Module", bound=nn.Module)


class Layer(nn.Module):
    """One entry of a stack: the original module and how to call it.

    Args:
        module: The original module, or a shallow copy of the original model reduced to this layer's part.
        run: Calls it: ``run(module, x, **context) -> Tensor``. Takes what it needs of the context, ignores the rest.
        prefix: The module's place in the original model, with a trailing dot, or empty.
    """

    def __init__(self, module: nn.Module, run: Run, prefix: str = "") -> None:
        super().__init__()
        self.module = module
        self.prefix = prefix
        self._run = run

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        return self._run(self.module, x, **context)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers (also those that are not saved) under their original names."""
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            yield self.prefix + name, tensor

    @property
    def has_storage(self) -> bool:
        return all(not tensor.is_meta for _, tensor in self.tensors())

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]], device: torch.device | str) -> None:
        """Gives a layer without storage its tensors, in the types that it has."""
        self.to_empty(device=device)
        left = dict(self.tensors())
        for name, value in values:
            left.pop(name).copy_(value)
        assert not left, f"no initial weights for {sorted(left)}"

    def original_state(self) -> dict[str, Tensor]:
        """What the original model's ``state_dict`` holds of this layer."""
        return {self.prefix + name: tensor for name, tensor in self.module.state_dict().items()}


class LayerStack(nn.Module):
    """Embedding, blocks, head, in the order in which they run.

    Args:
        layers: All layers.
        hidden_shape: Maps the input batch to the shape (B, T, D) of the tensor between layers.
        config: What the adapter needs again to save the model.

    Attributes:
        source: Where layers that have no storage yet get their initial weights from.
    """

    source: Source | None = None

    def __init__(self, layers: list[Layer], hidden_shape: Callable[[Tensor], torch.Size], config: Any = None) -> None:
        super().__init__()
        if len(layers) < 3:
            raise ValueError(
                f"the model has {len(layers) - 2} blocks; it takes at least one between embedding and head"
            )
        self.layers = nn.ModuleList(layers)
        self.hidden_shape = hidden_shape
        self.config = config

    @property
    def num_blocks(self) -> int:
        return len(self.layers) - 2

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> Layer:
        layer = self.layers[index]
        assert isinstance(layer, Layer)
        return layer

    def load(self, index: int, device: torch.device | str = "cpu") -> None:
        """Gives a layer its initial weights, where it has none yet."""
        if not self[index].has_storage:
            assert self.source is not None
            self[index].fill(self.source(index), device)

    def loaded_copy(self, index: int, device: torch.device | str) -> Layer:
        """A copy of a layer with weights; the stack's own stays as it is."""
        twin = copy.deepcopy(self[index])
        if twin.has_storage:
            return twin.to(device)
        assert self.source is not None
        twin.fill(self.source(index), device)
        return twin

    def names(self) -> list[list[str]]:
        """For each layer the original names of its tensors."""
        return [[name for name, _ in self[index].tensors()] for index in range(len(self))]

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """Runs every layer. ``x``: (B, C, H, W) or token ids (B, T); returns what the head returns."""
        for layer in self.layers:
            x = layer(x, **context)
        return x


def shallow_copy(module: Module) -> Module:
    """A copy with the same parameters and children, from which parts can be taken without touching the original."""
    twin = copy.copy(module)
    for parts in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[parts] = dict(twin.__dict__[parts])
    return twin


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws on the CPU follow ``seed`` inside and are left as they were outside, devices untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield

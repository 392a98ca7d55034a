"""A model as a flat list of layers, with the original names of its parameters."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Run = Callable[..., Tensor]
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

    def original_state(self) -> dict[str, Tensor]:
        """What the original model's ``state_dict`` holds of this layer."""
        return {self.prefix + name: tensor for name, tensor in self.module.state_dict().items()}


class LayerStack(nn.Module):
    """Embedding, blocks, head, in the order in which they run.

    Args:
        layers: All layers.
        hidden_shape: Maps the input batch to the shape (B, T, D) of the tensor between layers.
        config: What the adapter needs again to save the model.
    """

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

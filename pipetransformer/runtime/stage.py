"""The layers of one stage, as the module that a rank runs."""

from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.runtime.randomness import SampleRandomness


class Stage(nn.Module):
    """A contiguous run of layers.

    Frozen layers run in evaluation mode without gradient, so a cached and a computed prefix give the same numbers.

    Args:
        layers: The layers by their index in the model.
        first_active: First layer of the model that takes a gradient.
    """

    def __init__(self, layers: dict[int, nn.Module], first_active: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        self.first_active = first_active
        self._draws = {str(index): draws_numbers(layer) for index, layer in layers.items()}
        for index, layer in layers.items():
            layer.requires_grad_(index >= first_active)
        self.train()

    @property
    def trains(self) -> bool:
        """True when the stage has a layer that takes a gradient."""
        return any(int(index) >= self.first_active for index in self.layers)

    def train(self, mode: bool = True) -> "Stage":
        super().train(mode)
        for index, layer in self.layers.items():
            if int(index) < self.first_active:
                layer.eval()
        return self

    def forward(self, x: Tensor, *, keys: Tensor, **context: Tensor) -> Tensor:
        """Runs the stage on a micro-batch: ``x`` (B, ...), ``keys`` (B,), context tensors (B, ...)."""
        for name, layer in self.layers.items():
            x = self._run(name, layer, x, keys, context)
        return x

    def _run(self, name: str, layer: nn.Module, x: Tensor, keys: Tensor, context: dict[str, Any]) -> Tensor:
        if int(name) < self.first_active:
            with torch.no_grad():
                return layer(x, **context)
        if not (layer.training and self._draws[name]):
            return layer(x, **context)
        with SampleRandomness(keys, int(name)):
            return layer(x, **context)


def draws_numbers(layer: nn.Module) -> bool:
    """True when a layer in training mode may draw random numbers: a rate above 0 anywhere in it."""
    return any(
        isinstance(value, float) and value > 0
        for module in layer.modules()
        for name, value in vars(module).items()
        if name == "p" or "drop" in name
    )

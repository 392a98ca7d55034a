"""The layers of one stage, as the module that a rank runs."""

from collections.abc import Callable
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

    Attributes:
        active_parameters: Parameters of each active layer.
    """

    def __init__(self, layers: dict[int, nn.Module], first_active: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        self._frozen = [index for index in layers if index < first_active]
        self._active = [index for index in layers if index >= first_active]
        self.active_parameters = {index: list(layers[index].parameters()) for index in self._active}
        self._draws = any(draws_numbers(layers[index]) for index in self._active)
        for index, layer in layers.items():
            layer.requires_grad_(index >= first_active)
        self.train()

    @property
    def trains(self) -> bool:
        """True when the stage has a layer that takes a gradient."""
        return bool(self._active)

    def train(self, mode: bool = True) -> "Stage":
        super().train(mode)
        for index in self._frozen:
            self.layers[str(index)].eval()
        return self

    def forward(self, x: Tensor, *, keys: Tensor, **context: Tensor) -> Tensor:
        """Runs the stage on a micro-batch: ``x`` (B, ...), ``keys`` (B,), context tensors (B, ...)."""
        received = x
        with torch.no_grad():
            for index in self._frozen:
                x = self.layers[str(index)](x, **context)
        if self._frozen and received.requires_grad:
            x = _with_zero_gradient(x, received)
        if self.training and self._draws:
            with SampleRandomness(keys) as streams:
                return self._run_active(x, context, streams.layer)
        return self._run_active(x, context, _ignore)

    def _run_active(self, x: Tensor, context: dict[str, Any], begin: Callable[[int], None]) -> Tensor:
        for index in self._active:
            begin(index)
            x = self.layers[str(index)](x, **context)
        return x


def _ignore(_: int) -> None:
    """No layer draws random numbers."""


def _with_zero_gradient(x: Tensor, received: Tensor) -> Tensor:
    """Lets ``received`` get a gradient of zero.

    Torch before 2.13 sends a gradient to the stage below also where that is frozen, and stops when there is none.
    """
    return x + 0 * received.flatten()[0]


def draws_numbers(layer: nn.Module) -> bool:
    """True when a layer in training mode may draw random numbers: a rate above 0 anywhere in it."""
    return any(
        isinstance(value, float) and value > 0
        for module in layer.modules()
        for name, value in vars(module).items()
        if name == "p" or "drop" in name
    )

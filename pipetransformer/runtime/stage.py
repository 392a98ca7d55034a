"""The layers of one stage, as the module that a rank runs."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.rng import PerSampleRng
from pipetransformer.runtime.signals import ByLayer


class Stage(nn.Module):
    """A contiguous run of layers.

    Frozen layers run in evaluation mode without gradient, so a cached and a computed prefix give the same numbers.

    Args:
        layers: The layers by their index in the model.
        active_parameters: For each layer that takes a gradient the parameters that train.
        recompute: Run each active layer again in backward instead of keeping its activations.
    """

    def __init__(
        self,
        layers: dict[int, nn.Module],
        active_parameters: ByLayer,
        precision: Precision,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self._precision = precision
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        self.active_parameters = active_parameters
        self._frozen = [index for index in layers if index not in active_parameters]
        self._active = [index for index in layers if index in active_parameters]
        self._recompute = recompute
        self._draws = any(draws_numbers(layers[index]) for index in self._active)
        self.requires_grad_(False)
        for parameter in chain.from_iterable(active_parameters.values()):
            parameter.requires_grad_(True)
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
                x = self._precision.run(self.layers[str(index)], x, context)
        if self._frozen and received.requires_grad:
            x = _with_zero_gradient(x, received)
        if self._recompute and self.training:
            for index in self._active:
                x = checkpoint(self._run, [index], x, keys, context, use_reentrant=False, preserve_rng_state=False)
            return x
        return self._run(self._active, x, keys, context)

    def _run(self, layers: list[int], x: Tensor, keys: Tensor, context: dict[str, Tensor]) -> Tensor:
        """Runs layers; doing it again draws the same random numbers again."""
        if not (self.training and self._draws):
            return self._run_all(layers, x, context, _ignore)
        with PerSampleRng(keys) as streams:
            return self._run_all(layers, x, context, streams.layer)

    def _run_all(
        self, layers: list[int], x: Tensor, context: dict[str, Tensor], begin: Callable[[int], None]
    ) -> Tensor:
        for index in layers:
            begin(index)
            x = self._precision.run(self.layers[str(index)], x, context)
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

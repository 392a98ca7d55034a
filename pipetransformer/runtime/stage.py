"""The layers of one stage as the module that a rank runs, and frozen layers as a function."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetransformer.models.stack import Layer
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.rng import MakeRandomness, PerSampleRng

ParametersByLayer = dict[int, list[nn.Parameter]]
"""The active parameters of a rank's layers."""
FrozenForward = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""``forward(inputs, context)``: runs frozen layers on inputs (B, ...) and context tensors (B, ...)."""


class Stage(nn.Module):
    """Contiguous layers of the model.

    Frozen layers run in evaluation mode without gradient, so a cached and a computed prefix give the same numbers.

    Args:
        layers: The layers by their index in the model.
        active_parameters: For each layer that takes a gradient the parameters that train.
        precision: The types in which the layers compute.
        recompute: Recomputes each active layer in backward instead of keeping its activations.
        randomness: Makes the random numbers of a micro-batch.
    """

    def __init__(
        self,
        layers: dict[int, nn.Module],
        active_parameters: ParametersByLayer,
        precision: Precision,
        recompute: bool = False,
        randomness: MakeRandomness = PerSampleRng,
    ) -> None:
        super().__init__()
        self._precision, self._randomness = precision, randomness
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        self.active_parameters = active_parameters
        self._frozen = [index for index in layers if index not in active_parameters]
        self._active = [index for index in layers if index in active_parameters]
        self._recompute = recompute
        self._is_random = any(_may_draw_numbers(layers[index]) for index in self._active)
        self.requires_grad_(False)
        for parameter in chain.from_iterable(active_parameters.values()):
            parameter.requires_grad_(True)
        self.train()

    @property
    def trains(self) -> bool:
        """True when the stage has a parameter that takes a gradient."""
        return any(self.active_parameters.values())

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
                x = self._precision.run_layer(self.layers[str(index)], x, context)
        if self._frozen and received.requires_grad:
            x = _with_zero_gradient(x, received)
        if self._recompute and self.training:
            for index in self._active:
                x = checkpoint(self._run, [index], x, keys, context, use_reentrant=False, preserve_rng_state=False)
        else:
            x = self._run(self._active, x, keys, context)
        return x.contiguous()  # a pipeline sends it; a gradient takes the strides of what was received

    def _run(self, layers: list[int], x: Tensor, keys: Tensor, context: dict[str, Tensor]) -> Tensor:
        """Runs layers; running them again draws the same random numbers again."""
        if not (self.training and self._is_random):
            return self._run_all(layers, x, context, _ignore)
        with self._randomness(keys) as numbers:
            return self._run_all(layers, x, context, numbers.layer)

    def _run_all(
        self, layers: list[int], x: Tensor, context: dict[str, Tensor], begin: Callable[[int], None]
    ) -> Tensor:
        for index in layers:
            begin(index)
            x = self._precision.run_layer(self.layers[str(index)], x, context)
        return x


def _ignore(_: int) -> None:
    """Does nothing: no layer draws random numbers."""


def _with_zero_gradient(x: Tensor, received: Tensor) -> Tensor:
    """Gives ``received`` a gradient of zero.

    Torch before 2.13 sends a gradient to the stage below also where that is frozen, and fails when there is none.
    """
    return x + 0 * received.flatten()[0]


def _may_draw_numbers(layer: nn.Module) -> bool:
    """Returns ``True`` when a layer may draw random numbers in training: a rate above 0 anywhere in it."""
    return any(
        isinstance(value, float) and value > 0
        for module in layer.modules()
        for name, value in vars(module).items()
        if name == "p" or "drop" in name
    )


@contextmanager
def eval_forward(layers: Sequence[Layer], precision: Precision, device: torch.device) -> Iterator[FrozenForward]:
    """Puts layers into evaluation mode, and back at the end.

    Yields:
        A function that runs them one after the other without gradient.
    """

    @torch.no_grad()
    def forward(inputs: Tensor, context: dict[str, Tensor]) -> Tensor:
        x = inputs.to(device, precision.param_dtype if inputs.is_floating_point() else inputs.dtype)
        context = {name: tensor.to(device) for name, tensor in context.items()}
        for layer in layers:
            x = precision.run_layer(layer.forward, x, context)
        return x

    modes = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.eval()
        yield forward
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.train(mode)

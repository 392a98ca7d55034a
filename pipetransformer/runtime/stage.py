"""The layers of one stage as the module that a rank runs, and frozen layers as a function."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetransformer.host_copies import to_device
from pipetransformer.models.checks import may_draw_numbers
from pipetransformer.models.stack import Layer
from pipetransformer.runtime.compiled import BlockCompiler, LayerCall
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
        compiler: Compiles the blocks; not of sharded layers, which are all-gathered by hooks.
    """

    def __init__(
        self,
        layers: dict[int, nn.Module],
        active_parameters: ParametersByLayer,
        precision: Precision,
        recompute: bool = False,
        randomness: MakeRandomness = PerSampleRng,
        compiler: BlockCompiler | None = None,
    ) -> None:
        super().__init__()
        self._precision, self._randomness = precision, randomness
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        self.active_parameters = active_parameters
        self._frozen = [index for index in layers if index not in active_parameters]
        self._active = [index for index in layers if index in active_parameters]
        self._recompute = recompute
        self._is_random = any(may_draw_numbers(layers[index]) for index in self._active)
        self.requires_grad_(False)
        for parameter in chain.from_iterable(active_parameters.values()):
            parameter.requires_grad_(True)
        self.train()
        self._plain: dict[int, LayerCall] = dict(layers)
        self._calls = self._plain if compiler is None else _compiled(compiler, layers)

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
            x = self._run_frozen(x, keys, context)
        if self._frozen and received.requires_grad:
            x = _with_zero_gradient(x, received)
        if self._recompute and self.training:
            for index in self._active:
                x = self._recomputed(index, x, keys, context)
        else:
            x = self._run(self._active, x, keys, context)
        return x.contiguous()  # a pipeline sends it; a gradient takes the strides of what was received

    def end_step(self) -> None:
        """Ends the passes over a batch. Afterwards each parameter that trains has its gradient."""

    def _recomputed(self, index: int, x: Tensor, keys: Tensor, context: dict[str, Tensor]) -> Tensor:
        return recomputed(self._run, [index], x, keys, context)

    def _run_frozen(self, x: Tensor, keys: Tensor, context: dict[str, Tensor]) -> Tensor:
        """Runs the frozen layers, which draw no random numbers."""
        return self._run_all(self._frozen, self._calls, x, context, _ignore)

    def _run(self, layers: list[int], x: Tensor, keys: Tensor, context: dict[str, Tensor]) -> Tensor:
        """Runs layers; running them again draws the same random numbers again."""
        if not (self.training and self._is_random):
            return self._run_all(layers, self._calls, x, context, _ignore)
        # a compiled graph has torch's own functions in it, and not those that draw by sample
        calls = self._plain if self._randomness is PerSampleRng else self._calls
        with self._randomness(keys) as numbers:
            return self._run_all(layers, calls, x, context, numbers.layer)

    def _run_all(
        self, layers: list[int], calls: dict[int, LayerCall], x: Tensor, context: dict[str, Tensor],
        begin: Callable[[int], None],
    ) -> Tensor:  # fmt: skip
        for index in layers:
            begin(index)
            x = self._run_layer(index, calls[index], x, context)
        return x

    def _run_layer(self, index: int, call: LayerCall, x: Tensor, context: dict[str, Tensor]) -> Tensor:
        return self._precision.run_layer(call, x, context)


def recomputed(run: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Runs a function with activation checkpointing; by its arguments it draws the same random numbers again."""
    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)


def _compiled(compiler: BlockCompiler, layers: dict[int, nn.Module]) -> dict[int, LayerCall]:
    return {index: compiler.call(index, layer) for index, layer in layers.items() if isinstance(layer, Layer)}


def _ignore(_: int) -> None:
    """Does nothing: no layer draws random numbers."""


def _with_zero_gradient(x: Tensor, received: Tensor) -> Tensor:
    """Gives ``received`` a gradient of zero.

    Torch before 2.13 sends a gradient to the stage below also where that is frozen, and fails when there is none.
    """
    return x + 0 * received.flatten()[0]


@contextmanager
def eval_forward(
    layers: dict[int, Layer], precision: Precision, device: torch.device, compiler: BlockCompiler | None = None,
    lend: Callable[[Sequence[Layer], torch.device], AbstractContextManager[None]] | None = None,
) -> Iterator[FrozenForward]:  # fmt: skip
    """Puts layers into evaluation mode, and back at the end.

    Args:
        layers: By their index in the model; they run in this order.
        precision: The types in which they compute.
        device: Computes them.
        compiler: Compiles the blocks.
        lend: Brings layers to the device while they run; ``None`` where they are there.

    Yields:
        A function that runs them one after the other without gradient.
    """

    @torch.no_grad()
    def forward(inputs: Tensor, context: dict[str, Tensor]) -> Tensor:
        x = to_device(inputs, device, precision.param_dtype if inputs.is_floating_point() else None)
        context = {name: to_device(tensor, device) for name, tensor in context.items()}
        for layer, call in zip(layers.values(), calls, strict=True):
            with nullcontext() if lend is None else lend([layer], device):
                x = precision.run_layer(call, x, context)
        return x

    calls = [each.forward if compiler is None else compiler.call(index, each) for index, each in layers.items()]
    modes = {layer: layer.training for layer in layers.values()}
    try:
        for layer in modes:
            layer.eval()
        yield forward
    finally:
        for layer, mode in modes.items():
            layer.train(mode)

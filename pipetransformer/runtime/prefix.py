"""Frozen layers as a function."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pipetransformer.models.stack import Layer
from pipetransformer.runtime.precision import Precision

Compute = Callable[[Tensor, dict[str, Tensor]], Tensor]


@contextmanager
def evaluated(layers: Sequence[Layer], precision: Precision, device: torch.device) -> Iterator[Compute]:
    """Puts layers into evaluation mode, and back at the end.

    Yields:
        ``compute(inputs, context)``: runs one after the other without gradient.
    """

    @torch.no_grad()
    def compute(inputs: Tensor, context: dict[str, Tensor]) -> Tensor:
        x = inputs.to(device, precision.weights if inputs.is_floating_point() else inputs.dtype)
        context = {name: tensor.to(device) for name, tensor in context.items()}
        for layer in layers:
            x = precision.run(layer.forward, x, context)
        return x

    modes = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.eval()
        yield compute
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.train(mode)

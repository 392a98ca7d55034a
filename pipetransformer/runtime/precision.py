"""In which types a run computes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """Types of what is kept and of what is multiplied; the loss is computed in the type of the weights.

    Attributes:
        weights: Of weights, gradients, optimizer state, cached features and everything that goes between layers.
        products: Of matrix products, by torch's autocast; ``None``: as the weights.
    """

    weights: torch.dtype
    products: torch.dtype | None = None

    @property
    def scales_loss(self) -> bool:
        """Whether gradients leave the range of the type unless the loss is scaled."""
        return self.products == torch.float16

    def run(self, layer: Callable[..., Tensor], x: Tensor, context: dict[str, Any]) -> Tensor:
        """Runs one layer on ``x`` (B, ...) and context tensors (B, ...).

        What leaves any layer has the type of the weights, so that it makes no difference where a stage ends.
        """
        if self.products is None:
            return layer(x, **context)
        with torch.autocast(x.device.type, self.products):
            output = layer(x, **context)
        return output.to(self.weights)

    def cached_autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside it each weight that takes a gradient is cast once, for all micro-batches.

        Autocast forgets its casts at the end of the outermost block, so that has to come before the weights change. Not
        for sharded layers: a cast of the first micro-batch would get the gradient of a later one only after FSDP has
        dealt that out.
        """
        return nullcontext() if self.products is None else torch.autocast(device.type, enabled=False)


PRECISIONS = {
    "float32": Precision(torch.float32),
    "float64": Precision(torch.float64),
    "bfloat16": Precision(torch.float32, torch.bfloat16),
    "float16": Precision(torch.float32, torch.float16),
}

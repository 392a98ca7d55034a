"""The types in which a run computes, and the scale of its loss."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INITIAL_SCALE, GROWTH_INTERVAL = 2.0**16, 2000  # as GradScaler
MAX_SCALE = 2.0**24  # gradients that are all zero never overflow, and would let it grow until the loss does


@dataclass(frozen=True)
class Precision:
    """Types of parameters and of matrix products; the loss is computed in the type of the parameters.

    Attributes:
        param_dtype: Type of parameters, gradients, optimizer state, cached features and all tensors between layers.
        compute_dtype: Type of matrix products, by torch's autocast; ``None`` computes them in ``param_dtype``.
    """

    param_dtype: torch.dtype
    compute_dtype: torch.dtype | None = None

    @property
    def scales_loss(self) -> bool:
        """True when gradients leave the range of the type unless the loss is scaled."""
        return self.compute_dtype == torch.float16

    def run_layer(self, layer: Callable[..., Tensor], x: Tensor, context: dict[str, Any]) -> Tensor:
        """Runs one layer on ``x`` (B, ...) and context tensors (B, ...).

        The output of any layer has the type of the parameters, so that it makes no difference where a stage ends.
        """
        if self.compute_dtype is None:
            return layer(x, **context)
        with torch.autocast(x.device.type, self.compute_dtype):
            output = layer(x, **context)
        return output.to(self.param_dtype)

    def cached_autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Casts each weight that takes a gradient once for all micro-batches inside.

        Autocast clears its cache at the end of the outermost block, so that block has to end before the weights change.
        Not for sharded layers: a cast of the first micro-batch would get the gradient of a later one only after FSDP
        has reduce-scattered it.
        """
        return nullcontext() if self.compute_dtype is None else torch.autocast(device.type, enabled=False)


PRECISIONS = {
    "float32": Precision(torch.float32),
    "float64": Precision(torch.float64),
    "bfloat16": Precision(torch.float32, torch.bfloat16),
    "float16": Precision(torch.float32, torch.float16),
}


class LossScale:
    """The factor of the loss in backward: a power of two, so that no digit changes.

    It keeps the gradients of a type with few exponents between underflow and overflow, as torch's ``GradScaler``. That
    one cannot be used: it looks at the gradients of its own rank, and an overflow on one stage has to make all ranks
    skip the step, idle ones too. The scale is equal on every rank, because it follows from reduced numbers alone
    (design promise 4). Where none is needed it is 1 and stays so.

    Attributes:
        value: The scale of the next step.
        num_skipped: Steps so far whose gradient overflowed.
    """

    def __init__(self, precision: Precision) -> None:
        self.value, self._max = (INITIAL_SCALE, MAX_SCALE) if precision.scales_loss else (1.0, 1.0)
        self.num_skipped = 0
        self._num_good = 0  # in a row, at this scale

    @property
    def is_lowest(self) -> bool:
        """True when the scale cannot be what makes a gradient overflow."""
        return self.value <= 1

    def unscaled(self, squared_norms: Tensor) -> Tensor:
        """Computes squared norms of the gradient from those of the scaled loss's gradient."""
        return squared_norms / self.value**2

    def grow(self) -> None:
        """Counts a good step. The scale doubles after :data:`GROWTH_INTERVAL` of them in a row."""
        self._num_good += 1
        if self._num_good == GROWTH_INTERVAL:
            self.value, self._num_good = min(2 * self.value, self._max), 0

    def shrink(self) -> None:
        """Counts a skipped step and halves the scale."""
        self.value, self._num_good = self.value / 2, 0
        self.num_skipped += 1

    def state_dict(self) -> dict[str, float]:
        """Returns all that a run needs to go on with the same scale."""
        count = {"num_skipped": self.num_skipped, "num_good": self._num_good}
        return {"value": self.value, "max": self._max, **count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores what :meth:`state_dict` returned; of another precision the count of skipped steps alone."""
        self.num_skipped = int(state["num_skipped"])
        own, num_good = state["value"], int(state["num_good"])
        highest = state.get("max", MAX_SCALE if own > 1 else 1.0)  # states of earlier releases do not tell
        if highest == self._max:
            self.value, self._num_good = own, num_good

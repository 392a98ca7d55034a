"""Loss scaling: keeps the gradients of a type with few exponents between underflow and overflow.

As torch's ``GradScaler``, which cannot be used: it looks at the gradients of its own rank, and an overflow on one stage
has to make all ranks skip the step, idle ones too.
"""

from typing import Any

from pipetransformer.runtime.precision import Precision

INITIAL, GROWTH_INTERVAL = 2.0**16, 2000  # as GradScaler
LARGEST = 2.0**24  # gradients that are all zero never overflow, and would let it grow until the loss does


class LossScale:
    """What the loss is multiplied by before backward: a power of two, so that no digit changes.

    Equal on every rank, because it follows from reduced numbers alone (design promise 4). Without need of scaling it is
    1 and stays there.

    Attributes:
        value: The scale of the next step.
        num_skipped: Steps so far whose gradient overflowed.
    """

    def __init__(self, precision: Precision) -> None:
        self.value, self._largest = (INITIAL, LARGEST) if precision.scales_loss else (1.0, 1.0)
        self.num_skipped = 0
        self._num_good = 0  # in a row, at this scale

    @property
    def is_lowest(self) -> bool:
        """True when the scale cannot be what a gradient overflows from."""
        return self.value <= 1

    def unscaled(self, squared_norms: list[float]) -> list[float]:
        """Squared norms of the gradient, from those of the scaled loss's gradient."""
        return [squared / self.value**2 for squared in squared_norms]

    def grow(self) -> None:
        """After a step; the scale doubles when :data:`GROWTH_INTERVAL` of them have gone well in a row."""
        self._num_good += 1
        if self._num_good == GROWTH_INTERVAL:
            self.value, self._num_good = min(2 * self.value, self._largest), 0

    def shrink(self) -> None:
        """After a step that was skipped."""
        self.value, self._num_good = self.value / 2, 0
        self.num_skipped += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and its counters."""
        return {"value": self.value, "num_skipped": self.num_skipped, "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values of :meth:`state_dict`."""
        self.value, self.num_skipped, self._num_good = state["value"], state["num_skipped"], state["num_good"]

"""What the elastic runtime tells of a step and of a transition."""

import math
from dataclasses import dataclass

from pipetransformer.runtime import signals


class StepResult:
    """Of the global batch: the gradient norm of each layer before clipping (zero on idle ranks), and the mean loss.

    Args:
        shared: The loss in front; still on its way between the ranks when the step returns.

    Attributes:
        loss_scale: With which it was computed.
        skipped: The gradient overflowed at this scale and changed no weight; its norms are not finite.
    """

    def __init__(self, shared: signals.AsyncSum, squared_norms: list[float], loss_scale: float, skipped: bool) -> None:
        self._shared, self.loss_scale, self.skipped = shared, loss_scale, skipped
        self.layer_norms = tuple(math.sqrt(value) for value in squared_norms)
        self.total_norm = math.sqrt(sum(squared_norms))

    @property
    def loss(self) -> float:
        """Waits for it; equal on every rank."""
        return self._shared.values()[0]


@dataclass(frozen=True)
class TransitionReport:
    """What going to a plan took, in seconds, and what it moved over all ranks."""

    group_s: float
    move_s: float
    rebuild_s: float
    num_moves: int
    bytes_moved: int

"""The result of an optimizer step, and what ranks ask of each other along with its loss."""

import math
from dataclasses import dataclass

from pipetransformer.runtime.gradients import AsyncSum


@dataclass(frozen=True)
class Requests:
    """Wishes of a rank that all ranks have to follow at the same step; they travel with the loss.

    Attributes:
        save: Write a checkpoint.
        requeue: Stop, and be started again.
        quit: Stop.
    """

    save: bool = False
    requeue: bool = False
    quit: bool = False


NO_REQUESTS = Requests()


class StepResult:
    """Gradient norms and loss of a global batch.

    Args:
        sums: The mean loss, the ranks whose gradient overflowed or exploded and the ranks' requests; the all-reduce
            may still run when the step returns.
        squared_norms: Of each layer's gradient, zero on idle ranks.

    Attributes:
        layer_norms: The gradient norm of each layer before clipping; zero on idle ranks.
        total_norm: The norm of the whole gradient before clipping.
        loss_scale: The scale that the step was computed with.
        skipped: True when the gradient changed no weight: it overflowed at this scale and its norms are not finite, or
            the step was refused.
    """

    def __init__(self, sums: AsyncSum, squared_norms: list[float], loss_scale: float, skipped: bool) -> None:
        self._sums, self.loss_scale, self.skipped = sums, loss_scale, skipped
        self.layer_norms = tuple(math.sqrt(value) for value in squared_norms)
        self.total_norm = math.sqrt(sum(squared_norms))

    @property
    def loss(self) -> float:
        """The mean loss, equal on every rank. Waits for its all-reduce."""
        return self._sums.values()[0]

    @property
    def requests(self) -> Requests:
        """The requests of all ranks together. Waits for the loss."""
        return Requests(*(count != 0 for count in self._sums.values()[3:]))

"""Results of the elastic runtime, and what ranks ask of each other along with the loss of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from pipetransformer.runtime.gradients import AsyncSum

if TYPE_CHECKING:
    from pipetransformer.runtime.elastic import ElasticRuntime


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
        sums: The mean loss, the ranks' requests, and the ranks whose gradient overflowed or exploded; the all-reduce
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
        return Requests(*(count != 0 for count in self._sums.values()[1:-2]))


@dataclass(frozen=True)
class Evaluated:
    """Outputs of the samples that this rank's last stage computed.

    Attributes:
        ids: Sample ids (N,), without padding.
        outputs: The head's outputs (N, ...), or what was predicted of them.
    """

    ids: np.ndarray
    outputs: Tensor


@dataclass(frozen=True)
class TransitionReport:
    """Seconds that a transition took on this rank, and what it moved over all ranks.

    Attributes:
        moves: Layer, the rank that sent it or a part of it, and the one that got it.
    """

    group_s: float
    move_s: float
    rebuild_s: float
    moves: tuple[tuple[int, int, int], ...]
    bytes_moved: int

    @property
    def overhead_s(self) -> float:
        """Seconds besides moving layers, which the next transition takes again."""
        return self.group_s + self.rebuild_s


class UpdateObserver(Protocol):
    """Measures updates of the weights.

    Attributes:
        is_due: The next update is measured.
    """

    is_due: bool

    def around(self, runtime: ElasticRuntime, factor: float, update: Callable[[], None]) -> None:
        """Runs an update, and looks at what is before and after it.

        Args:
            factor: By which clipping has multiplied the gradients.
            update: Changes the weights.
        """
        ...

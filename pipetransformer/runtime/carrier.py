"""Numbers of each rank that travel with the gradients of replicas, so that a step makes no sum of their own.

DistributedDataParallel averages the gradients of all parameters. One more of them has a place for each rank. Backward
begins there, with the numbers of this rank as its gradient, which share a bucket with the gradient of the head::

    rank 0    backward   [a 0] head   block 6   block 5 ...          after the last bucket, on both    [a b] / 2
    rank 1    backward   [0 b] head   block 6   block 5 ...

A small all-reduce beside a step takes up to two milliseconds where ranks compute on all cores, because the threads that
carry it out take turns with them (``experiments/step_time/frozen``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

NUM_PARTS = 2  # of 24 bits each, where the gradient is float32


def carries(replicas: ProcessGroup) -> bool:
    """Returns whether gradients carry numbers exactly: to divide by the ranks rounds nothing."""
    return replicas.size() & (replicas.size() - 1) == 0


class CarryingStage(nn.Module):
    """The only stage of a plan, whose gradients carry numbers.

    Args:
        stage: Its output takes a gradient in training.
        replicas: The ranks that average the gradients, a power of two of them.
        like: A tensor of the type and on the device of the gradients.
        num_numbers: Of each rank, N.

    Attributes:
        told: Returns the numbers of this rank, (N,), float64, when a backward pass begins; ``None`` where they are not
            all known yet.
    """

    def __init__(self, stage: nn.Module, replicas: ProcessGroup, like: Tensor, num_numbers: int) -> None:
        super().__init__()
        self.stage, self._rank, self._num_ranks = stage, replicas.rank(), replicas.size()
        self.carried = nn.Parameter(like.new_zeros(self._num_ranks, NUM_PARTS, num_numbers))
        self.told: Callable[[], Tensor | None] = _nothing

    def forward(self, x: Tensor, **context: Tensor) -> Tensor:
        """Runs the stage."""
        output = self.stage(x, **context)
        return _Carry.apply(output, self.carried, self) if torch.is_grad_enabled() else output  # type: ignore[return-value]

    def parts(self) -> Tensor | None:
        """Returns this rank's numbers at its place and zeros at those of the others, (R, 2, N).

        The second part has what the first one rounds away, so that of 53 bits 48 arrive.
        """
        told = self.told()
        if told is None:
            return None
        parts = torch.zeros_like(self.carried)
        own = parts[self._rank]
        own[0] = told
        own[1] = (told - own[0]).nan_to_num()  # of a number that is not finite
        return parts

    def sums(self) -> Tensor:
        """Returns the sums of the last backward pass, (N,), float64, equal bit for bit on all ranks.

        Nothing is rounded on the way, because the places of the other ranks are zero.
        """
        assert self.carried.grad is not None, "backward has begun with the numbers"
        sums = self.carried.grad.double().sum(1).sum(0).mul_(self._num_ranks)
        self.carried.grad, self.told = None, _nothing
        return sums


def _nothing() -> None:
    return None


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, carried: Tensor, stage: CarryingStage) -> Tensor:
        ctx.stage = stage
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return gradients[0], ctx.stage.parts(), None

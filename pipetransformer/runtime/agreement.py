"""Agreement of all ranks on a step: its loss, whether its gradient is good, and what any of them asks for."""

import math
from dataclasses import astuple

import torch
from torch import Tensor

from pipetransformer.errors import Exploding, NotFinite
from pipetransformer.host_copies import to_device
from pipetransformer.runtime.gradients import AsyncSum
from pipetransformer.runtime.precision import LossScale
from pipetransformer.runtime.result import Requests, StepResult


class Agreement:
    """Sums over the ranks of the world and judges steps by them, so that every rank judges alike.

    Args:
        num_layers: Of the whole model.
        device: Of the sums.
        loss_scale: Adapted by each judgement.
    """

    def __init__(self, num_layers: int, device: torch.device, loss_scale: LossScale) -> None:
        self._num_layers, self._device, self._loss_scale = num_layers, device, loss_scale

    def sums(self, loss: Tensor, flags: Tensor, requests: Requests) -> AsyncSum:
        """Starts to sum the loss, the flags of the gradient (2,) and the requests over all ranks of the world."""
        return AsyncSum(torch.cat([loss[None], flags, self._numbers(*astuple(requests))]))

    def _numbers(self, *values: float) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float64), self._device)

    def idle(self, requests: Requests) -> StepResult:
        """Joins the loss all-reduce, so that idle ranks stay in step and learn of a skipped step or an abort."""
        nothing = self._numbers(0, 0, 0)
        sums = self.sums(nothing[0], nothing[1:], requests)
        overflowed, exploding = (count != 0 for count in sums.values()[1:3])
        return self.judge(sums, [math.inf if overflowed else 0.0] * self._num_layers, overflowed, exploding)

    def judge(self, sums: AsyncSum, squared_norms: list[float], overflowed: bool, exploding: bool) -> StepResult:
        """Adapts the loss scale. All ranks know of a bad gradient, and only then wait for the loss.

        Args:
            sums: Of this step.
            squared_norms: Of each layer's gradient.
            overflowed, exploding: The gradient is not finite, or its norm is too large.

        Raises:
            StepRefused: Where the gradient is to change no weight, and a smaller loss scale would not mend it.
        """
        result = StepResult(sums, squared_norms, self._loss_scale.value, skipped=overflowed or exploding)
        if overflowed:
            if not math.isfinite(result.loss) or self._loss_scale.is_lowest:
                problem = f"the loss ({result.loss:g}) or its gradient (norm {result.total_norm:g}) is not finite"
                raise NotFinite(problem, result)
            self._loss_scale.shrink()
        elif exploding:
            raise Exploding(f"the gradient has norm {result.total_norm:.4g}", result)
        else:
            self._loss_scale.grow()
        return result

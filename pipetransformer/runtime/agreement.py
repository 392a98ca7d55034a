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
        self._known: dict[Requests, Tensor] = {}

    def numbers(self, requests: Requests) -> Tensor:
        """Returns requests as numbers to sum, (3,), float64."""
        if requests not in self._known:  # nearly every step has none
            self._known[requests] = self._tensor(*astuple(requests))
        return self._known[requests]

    def sums(self, told: Tensor, flags: Tensor, is_summed: bool = False) -> AsyncSum:
        """Starts to sum over all ranks of the world.

        Args:
            told: The loss, and the :meth:`numbers` of the requests.
            flags: Of the gradient (2,).
            is_summed: They are the sums, and the flags are those of all ranks.
        """
        return AsyncSum(torch.cat([told, flags]), is_summed)

    def _tensor(self, *values: float) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float64), self._device)

    def idle(self, requests: Requests) -> StepResult:
        """Joins the loss all-reduce, so that idle ranks stay in step and learn of a skipped step or an abort."""
        sums = self.sums(torch.cat([self._tensor(0), self.numbers(requests)]), self._tensor(0, 0))
        overflowed, exploding = (count != 0 for count in sums.values()[-2:])
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

"""Signals of the optimizer's updates, measured in one step of :data:`EVERY`.

An update is known only by the weights before and after it, and their copy is what measuring costs. Updates change
slowly from step to step, so a few of them tell as much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.fsdp import local_part
from pipetransformer.runtime.signals.base import UpdateCollector

EVERY = 16
"""Steps from one measured update to the next; the first after each decision is measured."""


class RelativeUpdate(UpdateCollector):
    """The norm of a block's update over that of its weights, mean over the measured steps."""

    num_sums = 2

    def sums(self, before: Tensor, update: Tensor, gradient: Tensor) -> Sequence[Tensor]:
        return torch.dot(update, update), torch.dot(before, before)

    def add_sums(self, sums: Sequence[Sequence[float]]) -> None:
        self.add([math.sqrt(update / weights) if weights else 0.0 for update, weights in zip(*sums, strict=True)])


class LossDrop(UpdateCollector):
    """The first-order fall of the loss by a block's update, ``-sum dw g``, mean over the measured steps.

    ``g`` is the gradient before clipping, that of the loss. It is GreenTrainer's importance (Huang et al., ICLR 2024,
    section 3) of a whole block.
    """

    needs_gradient = True

    def sums(self, before: Tensor, update: Tensor, gradient: Tensor) -> Sequence[Tensor]:
        return (-torch.dot(update, gradient),)

    def add_sums(self, sums: Sequence[Sequence[float]]) -> None:
        self.add(sums[0])


class UpdateMeter:
    """Measures an update for several collectors.

    Args:
        collectors: Those that take updates.

    Attributes:
        collectors: The same.
        seconds: Time of measuring on this rank so far.
        is_due: The next update is measured.
    """

    def __init__(self, collectors: Sequence[UpdateCollector]) -> None:
        self.collectors, self.seconds, self.is_due = collectors, 0.0, False

    @torch.no_grad()
    def around(self, runtime: ElasticRuntime, factor: float, update: Callable[[], None]) -> None:
        """Runs an update and measures it if that is due. The ranks of a replica make the same calls.

        Args:
            factor: By which clipping has multiplied the gradients.
            update: Changes the weights.
        """
        if not self.is_due:
            update()
            return
        start = _now(runtime.device)
        parts = [(n, p, p.grad) for n, own in runtime.measured_blocks.items() for p in own if p.grad is not None]
        layers = [layer for layer, _, _ in parts]
        before = [local_part(parameter.detach()).reshape(-1).clone() for _, parameter, _ in parts]
        gradients = self._gradients([gradient for _, _, gradient in parts], factor)
        self.seconds += _now(runtime.device) - start
        update()
        start = _now(runtime.device)
        after = [local_part(parameter.detach()).reshape(-1) for _, parameter, _ in parts]
        self._measure(runtime, layers, before, after, gradients)
        self.seconds += _now(runtime.device) - start

    def _gradients(self, clipped: list[Tensor], factor: float) -> list[Tensor]:
        """Returns copies of gradients as they were before clipping; empty ones where nobody needs them."""
        if not any(collector.needs_gradient for collector in self.collectors):
            return [gradient.new_empty(0) for gradient in map(local_part, clipped)]
        return [local_part(gradient).reshape(-1) / factor for gradient in clipped]

    def _measure(
        self, runtime: ElasticRuntime, layers: list[int], before: list[Tensor], after: list[Tensor],
        gradients: list[Tensor],
    ) -> None:  # fmt: skip
        num_rows = sum(collector.num_sums for collector in self.collectors)
        sums = torch.zeros(num_rows, runtime.num_layers, dtype=torch.float64, device=runtime.device)
        for layer, old, new, gradient in zip(layers, before, after, gradients, strict=True):
            change = new - old
            scalars = [scalar for each in self.collectors for scalar in each.sums(old, change, gradient)]
            sums[:, layer] += torch.stack(scalars).double().to(sums.device)  # weights may lie in host memory
        rows = runtime.sum_over_parts(sums)[:, 1:-1].tolist()  # of the blocks
        for collector in self.collectors:
            collector.add_sums(rows[: collector.num_sums])
            rows = rows[collector.num_sums :]


def _now(device: torch.device) -> float:
    """Returns the time when the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

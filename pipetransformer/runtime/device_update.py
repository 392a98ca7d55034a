"""An update that the device makes or drops by itself, so that the host waits once in a step and not before the update.

Whether a gradient is finite and small enough, and by how much it is clipped, the device finds out from its norms. Fused
optimizers take that as a flag and drop the step. The host reads the same numbers while the update runs, and decides by
them alone, so that host and device agree. An optimizer that cannot drop a step waits until the host has read them::

    host      ... backward, norms ─► start to read them ─► update ─► wait for the norms ─► judge, log, next batch
    device    [ backward ][ norms ][ copy ][ update, or nothing of it ]                [ next step ...
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipetransformer.host_copies import Download
from pipetransformer.runtime.fsdp import local_part
from pipetransformer.runtime.stage import ParametersByLayer


class NormVerdict:
    """The judgement of a gradient by its norms, equal on every rank that has the same ones.

    Args:
        squared_norms: Of the whole gradient without the loss scale, by layer (num_layers,), float64.
        loss_scale: The factor of the loss in backward.
        max_norm: The largest norm of the whole gradient.

    Attributes:
        flags: Whether the gradient is not finite, and whether its norm is too large, 0 or 1, (2,), float64.
    """

    def __init__(self, squared_norms: Tensor, loss_scale: float, max_norm: float) -> None:
        self._loss_scale, self._max_norm = loss_scale, max_norm
        self._total = squared_norms.sum().sqrt()
        self.flags = torch.stack([~torch.isfinite(self._total), self._total > max_norm]).double()
        self._read = Download(torch.cat([squared_norms, self._total[None]]))

    def clip(self, parameters: ParametersByLayer, clip_norm: float | None) -> None:
        """Divides gradients by the loss scale and clips them, as ``gradients.unscale_and_clip`` does on the host."""
        if clip_norm is None and self._loss_scale == 1:
            return
        most = torch.ones_like(self._total)
        clipped = most if clip_norm is None else torch.minimum(most, clip_norm / (self._total + 1e-6))
        factor = clipped / self._loss_scale
        gradients = [local_part(p.grad) for own in parameters.values() for p in own if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    @contextmanager
    def dropping(self, optimizer: Optimizer) -> Iterator[None]:
        """Makes an optimizer that is :func:`~pipetransformer.optim.fused.droppable` drop its step if a flag is set."""
        fused: Any = optimizer
        fused.found_inf = self.flags.amax().float()
        try:
            yield
        finally:
            del fused.found_inf

    def read(self) -> tuple[list[float], bool, bool]:
        """Waits for the norms. Returns the squared ones, and whether they are not finite or too large."""
        *squared, total = self._read.values()
        return squared, not math.isfinite(total), total > self._max_norm

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


class NormVerdict:
    """The judgement of a gradient by its norms, equal on every rank that has the same ones.

    Args:
        squared_norms: Of the whole gradient without the loss scale, by layer (num_layers,), float64.
        max_norm: The largest norm of the whole gradient.

    Attributes:
        total_norm: Of the whole gradient, on the device, (), float64.
        flags: Whether the gradient is not finite, and whether its norm is too large, 0 or 1, (2,), float64.
    """

    def __init__(self, squared_norms: Tensor, max_norm: float) -> None:
        self._max_norm = max_norm
        self.total_norm = squared_norms.sum().sqrt()
        self.flags = torch.stack([~torch.isfinite(self.total_norm), self.total_norm > max_norm]).double()
        self._read = Download(torch.cat([squared_norms, self.total_norm[None]]))

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

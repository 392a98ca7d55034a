"""Dropout with one mask for all samples of a batch, as DeBERTa has it on what it adds to every sample's attention.

Other dropout draws each sample's mask by itself. One that all samples have in common has to be the same on every rank
and in every micro-batch, so the runtime draws it by the step.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def draw_once(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout of ``x``, which has no batch dimension. The runtime replaces this function, as it does torch's."""
    return F.dropout(x, p, training)


class SharedDropout(nn.Module):
    """Replacement of ``nn.Dropout`` where the input has no batch dimension."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return draw_once(x, self.p, self.training)

"""Random crops and flips that depend on the epoch and the sample alone, never on the rank that draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

AUGMENT_SEED = 0


def crop_and_flip(images: Tensor, epoch: int, ids: Sequence[int]) -> Tensor:
    """Shifts each picture by up to an eighth of its side, filling with black, and mirrors every other one.

    Args:
        images: Shape (B, C, H, W), in [0, 1].
        epoch: The epoch that the draw belongs to.
        ids: Sample ids, length B.

    Returns:
        Shape (B, C, H, W).
    """
    import torch
    from torch.nn.functional import pad

    _, num_channels, height, width = images.shape
    margin = max(1, min(height, width) // 8)
    draws = torch.from_numpy(np.stack([_draw(epoch, sample, margin) for sample in ids]))  # (B, 3)
    top, left, mirror = draws[:, :, None].unbind(1)  # each (B, 1)
    rows = top + torch.arange(height)  # (B, H)
    columns = left + torch.where(mirror == 1, torch.arange(width).flip(0), torch.arange(width))  # (B, W)
    padded = pad(images, [margin] * 4)
    batch = torch.arange(len(ids))[:, None, None, None]
    channels = torch.arange(num_channels)[:, None, None]
    return padded[batch, channels, rows[:, None, :, None], columns[:, None, None, :]]


def _draw(epoch: int, sample: int, margin: int) -> np.ndarray:
    """Offsets from the top and the left, each within 0..2 margin, and whether to mirror."""
    generator = np.random.default_rng([AUGMENT_SEED, epoch, int(sample)])
    return generator.integers(0, [2 * margin + 1, 2 * margin + 1, 2])

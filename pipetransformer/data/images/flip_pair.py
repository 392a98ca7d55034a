"""The pair of pictures that is all there is where a transform only mirrors: the plain one and the mirrored one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FlipPair:
    """Both pictures of each sample of a split, and which of them an epoch shows.

    Attributes:
        draws: ``draws(ids, epoch)`` tells which samples the epoch mirrors, bool (B,), by the stream of each sample.
        inputs: ``inputs(ids, mirrored)`` returns either picture of samples as the model takes it, (B, C, H, W).
    """

    draws: Callable[[np.ndarray, int], np.ndarray]
    inputs: Callable[[Sequence[int], bool], Tensor]

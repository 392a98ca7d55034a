"""The cache's view of a split: its samples by number, how long they are, and how to read them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

Inputs = Callable[[np.ndarray, int], Tensor]
Context = Callable[[np.ndarray, int], dict[str, Tensor]]
Compute = Callable[[Tensor, dict[str, Tensor]], Tensor]  # runs frozen layers on features (B, T, D) or on inputs


@dataclass(frozen=True)
class SampleSource:
    """Samples of one split. With several random draws of each sample, draw ``v`` of sample ``i`` is number ``v N + i``.

    Attributes:
        name: Name of the split.
        lengths: Tokens of each number at the layer boundary, (num_draws N,).
        hidden_size: Width of a feature, D.
        inputs: ``inputs(numbers, num_tokens)`` reads the model's inputs.
        context: ``context(numbers, num_tokens)`` returns the other arguments of every layer, at little cost.
        num_draws: Random draws that are stored of each sample, used in turn; 1 where nothing is random.
        draws: ``draws(ids, epoch)`` tells which draw of each sample an epoch uses, (B,); by default all in turn.
        is_local: Numbers that this node stores before the others, bool (num_draws N,); no preference by default.
    """

    name: str
    lengths: np.ndarray
    hidden_size: int
    inputs: Inputs
    context: Context
    num_draws: int = 1
    is_local: np.ndarray | None = None
    draws: Callable[[np.ndarray, int], np.ndarray] | None = None

    def numbers(self, ids: np.ndarray, epoch: int) -> np.ndarray:
        """Returns the numbers of samples (B,) in the draw that an epoch uses."""
        draw = epoch % self.num_draws if self.draws is None else self.draws(ids, epoch)
        return ids + draw * (len(self.lengths) // self.num_draws)

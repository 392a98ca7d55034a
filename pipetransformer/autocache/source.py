"""What the cache is told of a split."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

Inputs = Callable[[np.ndarray, int], Tensor]
Context = Callable[[np.ndarray, int], dict[str, Tensor]]
Compute = Callable[[Tensor, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class SampleSource:
    """Samples of one split that can be cached; a sample with several random draws counts once for each.

    Attributes:
        name: The split's name.
        lengths: Tokens of each sample at the layer boundary, (N,).
        inputs: ``inputs(ids, num_tokens)`` reads the model's inputs of samples.
        context: ``context(ids, num_tokens)`` gives what every layer needs besides, at little cost.
        is_local: Samples that this node keeps before others, bool (N,); all alike by default.
    """

    name: str
    lengths: np.ndarray
    inputs: Inputs
    context: Context
    is_local: np.ndarray | None = None

"""What the cache is told of a split."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

Read = Callable[[np.ndarray, int], tuple[Tensor, dict[str, Tensor]]]
Compute = Callable[[Tensor, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Source:
    """Samples of one split that can be cached; a sample with several random draws counts once for each.

    Attributes:
        name: The split's name.
        lengths: Tokens of each sample at the layer boundary, (N,).
        read: ``read(ids, num_tokens)`` gives the model's inputs and context of samples.
        at_home: Samples that this node keeps before others, bool (N,); all alike by default.
    """

    name: str
    lengths: np.ndarray
    read: Read
    at_home: np.ndarray | None = None

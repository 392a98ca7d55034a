"""An exponential moving average of the weights (EMA), kept as optimizer state.

So it moves, is sharded and saved with what it belongs to. A frozen layer is evaluated and saved with the weights that
it froze with, of which cached features are made. Where the layer trains again, its average goes on from where it stood
at the freeze, or begins anew, as ``freeze.on_unfreeze`` says.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

AVERAGE, COUNT = "average", "average_count"


def decay_at(count: int, decay: float) -> float:
    """Returns the decay of a weight that was averaged so many times: small at first, to forget the first weights soon.

    It is that of TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``.
    """
    return min(decay, (1 + count) / (10 + count))


class AveragingOptimizer(Optimizer):
    """An optimizer that averages the weights after each of its steps.

    Args:
        plain: Updates the weights.
        decay: Of the average in the long run.
    """

    def __init__(self, plain: Optimizer, decay: float) -> None:
        super().__init__([{"params": list(_parameters(plain))}], {})
        self._plain, self._decay = plain, decay
        self.param_groups, self.state = plain.param_groups, plain.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self._plain.step(closure)
        for parameter in _parameters(self._plain):
            if parameter.grad is not None:
                state = self.state[parameter]
                if AVERAGE not in state:
                    state[AVERAGE], state[COUNT] = parameter.detach().clone(), torch.zeros(())
                else:
                    state[COUNT] += 1
                    state[AVERAGE].lerp_(parameter, 1 - decay_at(int(state[COUNT]), self._decay))
        return loss


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])

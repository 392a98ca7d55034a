"""LAMB over parameters of which each rank of a mesh has a part (You et al., ICLR 2020, algorithm 2).

The rate of a parameter follows from the norms of the whole of it and of its whole update. All ranks of the mesh sum the
squares of both, of all parameters, in one all-reduce.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SumOverParts = Callable[[Sequence[Tensor], Tensor], Tensor]
"""Maps parameters and numbers of this rank's parts of them, (K, number of parameters), to the sums over all parts."""


class LambOfParts(Optimizer):
    """Takes the steps of timm's ``Lamb`` with the state of a
    :class:`~pipetransformer.optim.portable.PortableOptimizer` around it, so that either goes on where the other ended.

    Args:
        groups: The parameter groups, each with its ``weight_decay``.
        lr: The learning rate.
        betas: The decay of the means of the gradient and of its square per step.
        eps: Added to the root of the second mean.
        sum_over_parts: All ranks of the mesh call it alike.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float,
        sum_over_parts: SumOverParts,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._sum_over_parts = sum_over_parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        updates: list[tuple[dict[str, Any], Tensor, Tensor]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    updates.append((group, parameter, self._update(group, parameter)))
        parameters = [parameter for _, parameter, _ in updates]
        squares = [torch.stack([p.square().sum(), update.square().sum()]) for _, p, update in updates]
        if squares:
            norms = self._sum_over_parts(parameters, torch.stack(squares, 1)).sqrt()
            for (group, parameter, update), ratio in zip(updates, _trust_ratios(*norms), strict=True):
                adapted = update * ratio if group["weight_decay"] != 0 else update
                parameter.add_(adapted, alpha=-group["lr"])
        return None if closure is None else closure()

    def _update(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Advances the means of a parameter, and returns its update before the ratio."""
        state, gradient, (beta1, beta2) = self.state[parameter], parameter.grad, group["betas"]
        assert gradient is not None
        if not state:
            state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            state["step"] = torch.zeros(())
        state["step"] += 1
        count = int(state["step"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = state["exp_avg_sq"].sqrt() / (1 - beta2**count) ** 0.5
        update = (state["exp_avg"] / (1 - beta1**count)).div_(root.add_(group["eps"]))
        return update.add_(parameter, alpha=group["weight_decay"])


def _trust_ratios(weights: Tensor, updates: Tensor) -> Tensor:
    """Returns the norm of each weight over that of its update; 1 where one of them is zero."""
    ratio = weights / updates
    return torch.where((weights > 0) & (updates > 0), ratio, torch.ones_like(ratio))

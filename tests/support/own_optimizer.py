"""An optimizer as somebody adds it: one class, whose optimizer remembers what published ones do, wherever it likes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from pipetransformer.optim.base import OptimizerSpec


class Counting(Optimizer):
    """Momentum whose rate falls with two counts: one of a group, and one of a parameter that is no tensor."""

    def __init__(self, groups: list[dict[str, Any]], by_norm: bool) -> None:
        super().__init__(groups, {"lr": 0.0})
        self._by_norm = by_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter] or {"mean": torch.zeros_like(parameter), "age": 0}
                    self.state[parameter] = state
                    state["age"] += 1
                    state["mean"].lerp_(parameter.grad, 0.5)
                    size = state["mean"].norm() if self._by_norm else 1.0
                    parameter.sub_(state["mean"] / size, alpha=group["lr"] / (group["step"] + state["age"]))


@dataclass(frozen=True, kw_only=True)
class OwnOptimizer(OptimizerSpec):
    """Says nothing of the optimizer but how to build it."""

    by_norm: bool = False

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        return Counting(groups, self.by_norm)

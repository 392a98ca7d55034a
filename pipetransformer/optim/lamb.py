"""timm's LAMB (You et al., ICLR 2020) in the form that a transition can carry from rank to rank."""

from typing import Any

import torch
from timm.optim.lamb import Lamb


class PortableLamb(Lamb):
    """Keeps the step count beside each parameter's moments instead of in the parameter's group.

    So it moves with the layer, and a layer that starts to train later starts to count then. The gradient is clipped by
    the runtime, which knows the norm over all ranks, not in here.

    Args:
        groups: One parameter in each.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, max_grad_norm=None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            (parameter,) = group["params"]
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
                group["step"] = state["step"]
        return super().step(closure)

"""timm's LAMB (You et al., ICLR 2020) in a form that a transition can move from rank to rank."""

from typing import Any

import torch
from timm.optim.lamb import Lamb


class PortableLamb(Lamb):
    """LAMB with the step count beside each parameter's moments instead of in the parameter's group.

    So the count moves with the layer, and a layer that starts to train later starts to count then. Clipping is off: the
    runtime clips, because only it knows the norm over all ranks.

    Args:
        groups: Parameter groups of one parameter each.
        lr: The learning rate.
        betas: The decay of the running means of the gradient and of its square.
        eps: Added to the root of the second mean.
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

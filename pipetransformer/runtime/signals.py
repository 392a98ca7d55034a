"""Measures gradients on a rank and makes them equal on all (design promise 4)."""

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.runtime.stage import Stage


def squared_gradient_norms(stage: Stage, num_layers: int) -> Tensor:
    """Squared norm of the gradient of each layer of the stage, (num_layers,), float64, zero for all other layers."""
    norms = torch.zeros(num_layers, dtype=torch.float64, device=next(stage.parameters()).device)
    for name, layer in stage.layers.items():
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        if gradients:
            norms[int(name)] = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    return norms


def share(loss: Tensor, squared_norms: Tensor) -> tuple[float, list[float]]:
    """Sums the replicas' parts of the loss and gathers the stages' norms; equal on every rank.

    Args:
        loss: This rank's part of the loss.
        squared_norms: (num_layers,), zero where another rank reports the layer.
    """
    values = torch.cat([loss.reshape(1).to(squared_norms), squared_norms])
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    total, *norms = values.tolist()
    return total, norms


def clip(stage: Stage, total_norm: float, clip_norm: float | None) -> None:
    """Scales the stage's gradients so that the norm of the whole gradient is at most ``clip_norm``."""
    factor = 1.0 if clip_norm is None else clip_norm / (total_norm + 1e-6)  # as torch's clip_grad_norm_ does
    gradients = [p.grad for p in stage.parameters() if p.grad is not None]
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)

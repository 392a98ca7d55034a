"""Measures gradients on a rank and makes them equal on all (design promise 4)."""

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.runtime.stage import Stage


def squared_gradient_norms(stage: Stage, num_layers: int) -> Tensor:
    """Squared norm of the gradient of each layer of the stage, (num_layers,), float64, zero for all other layers."""
    norms = torch.zeros(num_layers, dtype=torch.float64, device=next(stage.parameters()).device)
    gradients, layers = [], []
    for index, parameters in stage.active_parameters.items():
        present = [p.grad for p in parameters if p.grad is not None]
        gradients += present
        layers += [index] * len(present)
    if gradients:
        squared = torch.stack(torch._foreach_norm(gradients)).double().square()
        norms.index_add_(0, torch.tensor(layers, device=norms.device), squared)
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
    if factor < 1:
        parameters = (p for layer in stage.active_parameters.values() for p in layer)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

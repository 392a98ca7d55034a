"""Measures gradients on a rank and makes them equal on all (design promise 4)."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipetransformer.runtime.parts import local_part

ByLayer = dict[int, list[nn.Parameter]]
"""The active parameters of a rank's layers."""


def squared_gradient_norms(parameters: ByLayer, num_layers: int, device: torch.device) -> Tensor:
    """Squared norm of what this rank has of the gradient of each layer, (num_layers,), float64, zero where nothing."""
    gradients = [(layer, local_part(p.grad)) for layer, own in parameters.items() for p in own if p.grad is not None]
    norms = torch.zeros(num_layers, dtype=torch.float64, device=device)
    if gradients:
        squared = torch.stack(torch._foreach_norm([gradient for _, gradient in gradients])).double().square()
        norms.index_add_(0, torch.tensor([layer for layer, _ in gradients], device=device), squared)
    return norms


def all_reduce_squared_norms(squared_norms: Tensor, group: ProcessGroup) -> list[float]:
    """Squared norms (num_layers,) of all layers, from each rank's part of the gradient; equal on all of the group.

    Args:
        group: The ranks that have the whole gradient between them, each a part of its own.
    """
    if group.size() > 1:
        dist.all_reduce(squared_norms, group=group)
    return squared_norms.tolist()


def broadcast_from_rank0(values: Tensor) -> Tensor:
    """Rank 0's numbers on every rank, so that all decide alike; float64 in host memory."""
    parts: list[Tensor] = [values]
    dist.broadcast_object_list(parts)
    return parts[0]


class AsyncSum:
    """Sums over all ranks that are under way while this rank goes on.

    Args:
        parts: This rank's part of each, scalars.
    """

    def __init__(self, *parts: Tensor) -> None:
        self._total = torch.stack(parts).detach()
        self._work = dist.all_reduce(self._total, async_op=True) if dist.get_world_size() > 1 else None

    def values(self) -> list[float]:
        """Waits for the sums; equal on every rank."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total.tolist()


def unscale_and_clip(parameters: ByLayer, total_norm: float, clip_norm: float | None, loss_scale: float) -> None:
    """Divides the gradients by the loss scale, and more where the norm of the whole gradient exceeds ``clip_norm``.

    Args:
        total_norm: Over all ranks, and of the gradient without the scale.
    """
    factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (total_norm + 1e-6))  # as torch's clip_grad_norm_ does
    factor /= loss_scale
    if factor != 1:
        gradients = [local_part(p.grad) for own in parameters.values() for p in own if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

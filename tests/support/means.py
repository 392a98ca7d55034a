"""Gradients of replicas, averaged."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.autopipe.memory import BUCKET_BYTES
from pipetransformer.runtime.gradients import all_reduce_gradients

SHAPES = ((3,), (BUCKET_BYTES // 8, 1), (2, 5), (), (BUCKET_BYTES // 16 + 1, 2), (BUCKET_BYTES // 16, 1), (4,))


def averaged() -> tuple[list[Tensor | None], float]:
    """Gradients that are all ``rank + their number`` before, and the mean rank; the last parameter has none."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + dist.get_rank())
    parameters[4].grad = parameters[4].grad.t().contiguous().t()  # type: ignore[union-attr]  # another layout
    parameters.append(nn.Parameter(torch.zeros(2)))
    all_reduce_gradients(parameters, group)
    return [parameter.grad for parameter in parameters], (dist.get_world_size() - 1) / 2

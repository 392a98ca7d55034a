"""Averages the gradients of a pipeline's device over the replicas, once its passes of a step are done.

DDP would do it within the last backward pass of each stage, and the stage below gets its own gradient only after that::

    with DDP     device 1   B2 B3 [all-reduce]                       here    device 1   B2 B3 [all-reduce]
                 device 0      B2              B3 [all-reduce]               device 0      B2 B3 [all-reduce]
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.autopipe.memory import BUCKET_BYTES


def all_reduce_gradients(parameters: Iterable[nn.Parameter], replicas: dist.ProcessGroup) -> None:
    """Puts the mean over the replicas in place of each gradient; all ranks of the group call it.

    Gradients of :data:`BUCKET_BYTES` and more are summed where they lie, smaller ones travel together, up to so many at
    a time.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_div_(gradients, replicas.size())
    under_way = [dist.all_reduce(each, group=replicas, async_op=True) for each in gradients if _goes_alone(each)]
    for pack in _packs(each for each in gradients if not _goes_alone(each)):
        together = torch.cat([each.reshape(-1) for each in pack])
        dist.all_reduce(together, group=replicas)
        parts = together.split([each.numel() for each in pack])
        torch._foreach_copy_(pack, [part.view_as(each) for part, each in zip(parts, pack, strict=True)])
    for work in under_way:
        assert work is not None
        work.wait()


def _goes_alone(gradient: Tensor) -> bool:
    return gradient.nbytes >= BUCKET_BYTES and gradient.is_contiguous()


def _packs(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """In order, as many at a time as fit, and one at least."""
    pack: list[Tensor] = []
    for gradient in gradients:
        if pack and sum(each.nbytes for each in pack) + gradient.nbytes > BUCKET_BYTES:
            yield pack
            pack = []
        pack.append(gradient)
    if pack:
        yield pack

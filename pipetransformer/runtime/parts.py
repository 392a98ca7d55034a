"""A rank's part of a tensor that may be sharded."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has a shard of it."""
    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What a rank keeps of a tensor, on the same memory: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """A tensor brought together from its shards, on every rank; all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

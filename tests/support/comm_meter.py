"""Counts the bytes that this rank receives in the collectives of a mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


@dataclass
class Received:
    """Bytes so far."""

    num_bytes: int = 0


@contextmanager
def comm_meter() -> Iterator[Received]:
    """Counts inside. An all-reduce is a reduce-scatter and an all-gather."""
    received = Received()
    gather, scatter, reduce, exchange = (
        dist.all_gather_into_tensor,
        dist.reduce_scatter_tensor,
        dist.all_reduce,
        dist.batch_isend_irecv,
    )

    def all_gather(output: Tensor, own: Tensor, group: Any = None) -> Any:
        received.num_bytes += output.nbytes - own.nbytes
        return gather(output, own, group=group)

    def reduce_scatter(own: Tensor, parts: Tensor, group: Any = None) -> Any:
        received.num_bytes += parts.nbytes - own.nbytes
        return scatter(own, parts, group=group)

    def all_reduce(tensor: Tensor, group: Any = None, **options: Any) -> Any:
        size = dist.get_world_size(group)
        received.num_bytes += 2 * (size - 1) * tensor.nbytes // size
        return reduce(tensor, group=group, **options)

    def batch_isend_irecv(operations: list[dist.P2POp]) -> Any:
        received.num_bytes += sum(each.tensor.nbytes for each in operations if each.op is dist.irecv)
        return exchange(operations)

    with (
        mock.patch.object(dist, "all_gather_into_tensor", all_gather),
        mock.patch.object(dist, "reduce_scatter_tensor", reduce_scatter),
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(dist, "batch_isend_irecv", batch_isend_irecv),
    ):
        yield received

"""Attention over tokens that the ranks of an axis have in parts: keys and values go around a ring.

Ring self-attention as Li et al. (2021) publish it, with an explicit softmax over all scores of a rank's queries::

    hop         0      1      2            rank 0 multiplies its queries with the keys of rank 0, then 2, then 1,
    rank 0     k_0    k_2    k_1           and each result is a block of columns of its scores (T / 3, T)
    rank 1     k_1    k_0    k_2
    rank 2     k_2    k_1    k_0

The gradient of keys and values is the sum over all queries: a reduce-scatter over the ring, not a mean.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pipetransformer.runtime.mesh import MeshAxis, widened


def ring_scores(query: Tensor, key: Tensor, axis: MeshAxis, sizes: Sequence[int]) -> Tensor:
    """Multiplies this rank's queries (..., t, d) with the keys of all ranks.

    Args:
        key: Of this rank's tokens, (..., t, d).
        sizes: The tokens of each rank.

    Returns:
        (..., t, T).
    """
    return _Scores.apply(query.contiguous(), key.contiguous(), axis, tuple(sizes))


def ring_values(weights: Tensor, value: Tensor, axis: MeshAxis, sizes: Sequence[int]) -> Tensor:
    """Sums the values of all ranks by the weights (..., t, T) of this rank's queries.

    Args:
        value: Of this rank's tokens, (..., t, d).
        sizes: The tokens of each rank.

    Returns:
        (..., t, d).
    """
    return _Values.apply(weights.to(value.dtype), value.contiguous(), axis, tuple(sizes))


class _Scores(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, axis: MeshAxis, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.ring = axis, sizes
        scores = query.new_empty((*query.shape[:-1], sum(sizes)))
        for columns, block in _around(key, axis, sizes):
            scores[..., columns] = query @ block.mT
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (query, key), (axis, sizes) = gradients, ctx.saved_tensors, ctx.ring
        of_query = torch.zeros_like(widened(query))
        for columns, block in _around(key, axis, sizes):
            of_query += gradient[..., columns] @ block
        return of_query.to(query.dtype), _scatter_tokens(gradient.mT @ query, axis, sizes), None, None


class _Values(Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, axis: MeshAxis, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(weights, value)
        ctx.ring = axis, sizes
        output = widened(value[..., :0, :]).new_zeros((*weights.shape[:-1], value.shape[-1]))
        for columns, block in _around(value, axis, sizes):
            output += weights[..., columns] @ block
        return output.to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (weights, value), (axis, sizes) = gradients, ctx.saved_tensors, ctx.ring
        of_weights = torch.empty_like(weights)
        for columns, block in _around(value, axis, sizes):
            of_weights[..., columns] = gradient @ block.mT
        return of_weights, _scatter_tokens(weights.mT @ gradient, axis, sizes), None, None


def _around(own: Tensor, axis: MeshAxis, sizes: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
    """Yields the block of every rank, this one's first, with its columns among all tokens."""
    starts, block = [0, *accumulate(sizes)], own
    for hop in range(axis.size):
        source = (axis.index - hop) % axis.size
        yield slice(starts[source], starts[source + 1]), block
        if hop < axis.size - 1:
            num_tokens = sizes[(source - 1) % axis.size]
            received = block.new_empty((*block.shape[:-2], num_tokens, block.shape[-1]))
            block = axis.rotate(block.contiguous(), received)


def _scatter_tokens(x: Tensor, axis: MeshAxis, sizes: Sequence[int]) -> Tensor:
    """Sums (..., T, d) over the ring, of which each rank gets its tokens; parts are padded to one size on the way."""
    most = max(sizes)
    padded = torch.cat([F.pad(part, (0, 0, 0, most - part.shape[-2])) for part in x.split(list(sizes), -2)], -2)
    return axis.reduce_scatter(padded, x.ndim - 2)[..., : sizes[axis.index], :]

"""Gradients of embeddings: most of their rows are zero, because a batch has few of the tokens that there are.

Replicas average the rows that any of them touched, and leave the others as they are, zero::

    rank 0    rows of the gradient    . . a . b . .      touched, by any rank    . . 1 1 1 . .      all-reduced    a+c
    rank 1                            . . c d . . .                                                                d
                                                                                                                   b

The rows come from the gradient itself, so whatever module has made it, nothing is lost. The host has to know how many
there are, which on a GPU would make it wait in every step: there, embeddings are averaged like all other weights.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipetransformer.autopipe.memory import BUCKET_BYTES
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime.gradients import sum_gradients

MOST_ROWS = 0.5  # of a gradient; with more of them, to gather and scatter them takes as long as it saves


def embedding_weights(stack: LayerStack, index: int, copy: Layer | None = None) -> list[nn.Parameter]:
    """Returns the weights of a layer of which replicas average rows: of its large embeddings on a CPU.

    A weight that another layer shares is none of them: a head gives every row a gradient.

    Args:
        index: Number of the layer.
        copy: The layer's copy whose weights are returned in place of its own.
    """
    layer = copy or stack[index]
    shared = {place.name for tie in stack.ties for place in tie if place.layer == index}
    tables = {module.weight for module in layer.modules() if isinstance(module, nn.Embedding)}
    return [
        weight
        for name, weight in layer.by_name().items()
        if weight in tables
        and name not in shared
        and weight.requires_grad
        and weight.nbytes >= BUCKET_BYTES
        and weight.device.type == "cpu"
    ]


def touched_rows(gradient: Tensor) -> Tensor:
    """Returns which rows of a gradient (N, D) have a number that is not zero, NaN included, (N,), bool."""
    return (gradient.amax(1) != 0) | (gradient.amin(1) != 0)


def untouched_bytes(weights: Iterable[nn.Parameter], batches: float) -> float:
    """Returns the bytes of gradients that replicas do not sum in a step.

    Args:
        weights: With the gradient of a batch, or without where it does not use them.
        batches: How many like it a step has; they have no row in common at worst.
    """
    total = 0.0
    for weight in weights:
        touched = 0.0 if weight.grad is None else touched_rows(weight.grad).sum().item()
        num_rows = min(len(weight), batches * touched)
        total += weight.nbytes * (1 - num_rows / len(weight)) * (num_rows <= MOST_ROWS * len(weight))
    return total


def all_reduce_embeddings(weights: Iterable[nn.Parameter], replicas: ProcessGroup) -> None:
    """Replaces each gradient by its mean over the replicas. All ranks of the group call it."""
    for weight in weights:
        if weight.grad is not None:
            sum_embedding(weight.grad, replicas, divisor=replicas.size())


def sum_embedding(gradient: Tensor, group: ProcessGroup, divisor: int = 1) -> None:
    """Replaces a gradient (N, D) by its sum over a group, equal bit for bit on its ranks, all of which call it.

    Args:
        divisor: Number by which every summand is divided.
    """
    touched = touched_rows(gradient).to(torch.uint8)
    dist.all_reduce(touched, dist.ReduceOp.MAX, group)
    rows = touched.nonzero().squeeze(1)
    if len(rows) > MOST_ROWS * len(gradient):
        sum_gradients([gradient.div_(divisor)], group)
        return
    total = gradient[rows].div_(divisor)
    dist.all_reduce(total, group=group)
    gradient[rows] = total

"""Stacks whose head looks like a block, for the pool."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from pipetransformer.autopipe.profile import LayerProfile
from pipetransformer.models.stack import Layer, LayerStack
from pipetransformer.optim.base import SGD
from pipetransformer.profiling.layers import profile
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.runtime.rng import sample_keys

CPU = torch.device("cpu")


def stack_of(*widths: int) -> LayerStack:
    """Linear layers with as many numbers between them."""
    layers = [Layer(nn.Linear(*pair), nn.Module.__call__) for pair in pairwise(widths)]
    return LayerStack(layers, lambda x: torch.Size(x.shape))


def _cubes(outputs: Tensor, _: Tensor) -> Tensor:
    """A loss for each sample, which keeps more than the head's output."""
    return (outputs.exp() ** 3).sum(1)


def measured() -> tuple[LayerProfile, ...]:
    small, large = (
        Batch(ids, torch.ones(len(ids), 8), {}, *torch.ones(2, len(ids)), sample_keys(0, 0, ids), (8,), 4.0)
        for ids in (np.arange(2), np.arange(4))
    )
    return profile(stack_of(8, 8, 8, 8), _cubes, (small, large), SGD(lr=1.0), CPU, PRECISIONS["float32"]).layers

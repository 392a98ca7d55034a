"""Trainings with compiled blocks, and how many graphs they take."""

from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from pipetransformer.models.layer import Layer
from pipetransformer.runtime import compiled
from pipetransformer.runtime.compiled import BlockCompiler, LayerCall
from pipetransformer.runtime.elastic import ElasticRuntime
from support.cases import Case
from support.trainings import Plans, Trace, train_elastic


def train_compiled(case: Case, plans: Plans, folder: str, backend: str = "eager") -> tuple[Trace, list[int]]:
    """The training, and the graphs that were made until the end of each step.

    Args:
        backend: ``eager`` runs a graph as it is traced, ``aot_eager`` with its backward pass traced, too.
    """
    torch._dynamo.reset()
    counters.clear()
    graphs: list[int] = []
    step = ElasticRuntime.train_step

    def counted(self: ElasticRuntime, *arguments: Any, **options: Any) -> Any:
        result = step(self, *arguments, **options)
        graphs.append(counters["stats"]["unique_graphs"])
        return result

    with mock.patch.object(compiled, "BACKEND", backend), mock.patch.object(ElasticRuntime, "train_step", counted):
        return train_elastic(case, plans, folder), graphs


def train_with_frozen_graphs(case: Case, plans: Plans, folder: str) -> Trace:
    """Active blocks run the graphs of frozen ones, as torch's issue 139476 tells of."""
    call = BlockCompiler.call

    def passive(self: BlockCompiler, index: int, layer: Layer) -> LayerCall:
        own = call(self, index, layer)

        def run(x: Tensor, **context: Tensor) -> Tensor:
            with torch.no_grad():
                y = own(x, **context)
            return y + 0 * x  # a gradient goes on

        return run if own is not layer else own

    with mock.patch.object(BlockCompiler, "call", passive):
        return train_compiled(case, plans, folder)[0]

"""Replicas of models whose embedding is large, and what they send."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.runtime import embedding_gradients, engine, mesh_gradients
from pipetransformer.runtime.embedding_gradients import all_reduce_embeddings
from support import trainings
from support.cases import Case
from support.trainings import Plans, Trace, train_elastic

NUM_ROWS, WIDTH = 100, 3
_all_reduce = dist.all_reduce


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def gradient_of(rank: int, rows: list[int]) -> Tensor:
    """A gradient that is zero but for these rows."""
    gradient = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64)
    gradient[rows] = torch.arange(len(rows), dtype=torch.float64)[:, None] + 1.0 + rank
    return gradient


def averaged(rows_of_ranks: list[list[int]], filled: float | None = None) -> tuple[Tensor, list[int]]:
    """Returns the gradient afterwards, and the numbers in each tensor that was all-reduced; ``filled`` is a number."""
    weight, sizes = nn.Parameter(torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64)), list[int]()
    weight.grad = gradient_of(dist.get_rank(), rows_of_ranks[dist.get_rank()])
    if filled is not None and dist.get_rank() == 0:
        weight.grad[rows_of_ranks[0][0], 1] = filled

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return _all_reduce(tensor, *arguments, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        all_reduce_embeddings([weight, nn.Parameter(torch.zeros(2, 2))], world())
    return weight.grad, sizes


def train_counted(case: Case, plans: Plans, folder: str) -> tuple[Trace, int]:
    """Trains, and counts how often rows were all-reduced in place of a whole gradient."""
    with mock.patch.object(embedding_gradients, "sum_gradients") as whole:
        with mock.patch.object(engine, "all_reduce_embeddings", wraps=all_reduce_embeddings) as by_rows:
            trace = train_elastic(case, plans, folder)
        whole.assert_not_called()
    return trace, sum(bool(call.args[0]) for call in by_rows.call_args_list)


def _rows_of_rank_0(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
    """Takes the rows that the first replica touched for those that all of them did."""
    if tensor.dtype == torch.uint8:
        return dist.broadcast(tensor, group=arguments[1], group_src=0)
    return _all_reduce(tensor, *arguments, **options)


ON_A_MESH = "each rank of a mesh keeps its own"
MUTATIONS: dict[str, Any] = {
    "each replica keeps its own": (engine, "all_reduce_embeddings", lambda weights, replicas: None),
    "rows of other replicas are left out": (embedding_gradients.dist, "all_reduce", _rows_of_rank_0),
    ON_A_MESH: (mesh_gradients, "sum_embedding", lambda gradient, group: None),
}


def train_mutated(mutation: str, case: Case, plans: Plans, folder: str) -> Trace:
    # replicas whose weights differ would not even be put together
    with mock.patch.object(*MUTATIONS[mutation]), mock.patch.object(trainings, "moments", return_value={}):
        return train_elastic(case, plans, folder)

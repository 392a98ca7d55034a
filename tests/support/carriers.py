"""Numbers that travel with the gradients of replicas."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.runtime.carrier import CarryingStage, carries
from support.cases import Case
from support.plans import HEAD, plan
from support.trainings import Plans, Trace, build, go, ids_of, rate, train_elastic

_sums = CarryingStage.sums


def told(numbers_of_ranks: list[list[float]], num_microbatches: int) -> list[tuple[list[float], Tensor]]:
    """The sums of two steps in float32, and the gradient of a weight that is the rank's number in both."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert isinstance(group, dist.ProcessGroup)
    assert carries(group)
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    stage = CarryingStage(layer, group, layer.weight, len(numbers_of_ranks[0]))
    replica = DistributedDataParallel(stage, gradient_as_bucket_view=True)
    results = []
    for step in range(2):
        own = torch.tensor(numbers_of_ranks[rank], dtype=torch.float64) * (step + 1)
        for index in range(num_microbatches):
            is_last = index == num_microbatches - 1
            with nullcontext() if is_last else replica.no_sync():
                output = replica(torch.full((1, 1), float(rank)))
                stage.told = lambda is_last=is_last, own=own: own if is_last else None
                output.sum().backward()
        assert layer.weight.grad is not None
        results.append((stage.sums().tolist(), layer.weight.grad.clone()))
        layer.weight.grad = None
    return results


def count_sums_of_a_step(case: Case, folder: str, ends: Sequence[int] = (HEAD,)) -> tuple[int, float]:
    """Takes two steps on as many replicas as there can be: torch sets a pipeline up in its first one.

    Returns:
        The sums over the ranks that the second one makes besides DDP's; the loss of the first one.
    """
    runtime, loader, groups = build(case, folder)
    go(runtime, loader, plan(0, 0, list(ends), dist.get_world_size() // len(ends), len(ends)))
    loss = runtime.train_step(loader, ids_of(case, 0), 0, rate(0)).loss
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        runtime.train_step(loader, ids_of(case, 1), 1, rate(1))
    loader.close()
    groups.close()
    return sums.call_count, loss


def _of_this_rank(self: CarryingStage) -> Tensor:
    assert self.carried.grad is not None
    self.carried.grad[: self._rank] = 0
    self.carried.grad[self._rank + 1 :] = 0
    return _sums(self)


def _mean(self: CarryingStage) -> Tensor:
    return _sums(self) / self._num_ranks


MUTATIONS: dict[str, Callable[[CarryingStage], Tensor]] = {
    "numbers of other ranks are lost": _of_this_rank,
    "the mean is taken for the sum": _mean,
}


def train_mutated(mutation: str, case: Case, plans: Plans, folder: str) -> Trace:
    with mock.patch.object(CarryingStage, "sums", MUTATIONS[mutation]):
        return train_elastic(case, plans, folder)

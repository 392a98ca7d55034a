"""Keeps weights equal that layers share, wherever their copies lie.

Each copy gets the sum of the copies' gradients, after the mean over the replicas and before anything is measured. With
the same gradient and the same optimizer state the copies stay equal bit for bit::

    replica 0    rank 0 [E 1 2]    rank 1 [3 4]    rank 2 [5 6 H]        E's gradient + H's, in the group of 0 and 2
    replica 1    rank 3 [E 1 2]    rank 4 [3 4]    rank 5 [5 6 H]                                        of 3 and 5
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.autodp.topology import Position, holder_ranks
from pipetransformer.autopipe.plan import Plan
from pipetransformer.models.sharing import Tie
from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime.groups import Groups, Ranks


class TiedWeights:
    """The gradients of a rank's shared weights under a plan.

    Args:
        groups: Has those of :func:`tied_groups`.
    """

    def __init__(self, stack: LayerStack, plan: Plan, place: Position, groups: Groups) -> None:
        own = plan.device_layers(place.device)
        self._shared: list[tuple[list[nn.Parameter], dist.ProcessGroup]] = []
        for tie in _training(stack, plan):
            copies = [stack[layer].by_name()[name] for layer, name in tie if layer in own]
            if copies:
                self._shared.append((copies, groups[_ranks(tie, plan, place.replica)]))

    def add_up(self) -> None:
        """Gives every copy the sum, equal bit for bit; all ranks of the pipeline call it."""
        for copies, group in self._shared:
            total, *others = map(_gradient, copies)
            for other in others:
                total += other
            if group.size() > 1:
                dist.all_reduce(total, group=group)
            for other in others:
                other.copy_(total)


def tied_groups(stack: LayerStack, plan: Plan) -> Iterator[Ranks]:
    """The ranks of each pipeline that have copies of a shared weight that trains."""
    for tie in _training(stack, plan):
        for replica in range(plan.num_replicas):
            yield _ranks(tie, plan, replica)


def _training(stack: LayerStack, plan: Plan) -> list[Tie]:
    return [tie for tie in stack.ties if tie[0].layer >= plan.first_active_layer]


def _ranks(tie: Tie, plan: Plan, replica: int) -> Ranks:
    return holder_ranks(plan, replica, (place.layer for place in tie))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Zero where the copy took no part."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad

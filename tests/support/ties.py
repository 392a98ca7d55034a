"""Shared weights with made-up gradients, for the pool."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.autodp.topology import position
from pipetransformer.autopipe.plan import Plan
from pipetransformer.models.stack import Layer, LayerStack
from pipetransformer.runtime.groups import Groups
from pipetransformer.runtime.tied import TiedWeights, tied_groups

SHARING, TAKES_NO_PART = (0, 2, 4), 2


def gradient(layer: int, replica: int) -> Tensor:
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(10 * replica + layer))


def stack() -> LayerStack:
    """Five layers, three of which share a weight."""
    modules = [nn.Linear(3, 3) for _ in range(5)]
    for layer in SHARING:
        modules[layer].weight = modules[0].weight
    return LayerStack([Layer(module, nn.Module.__call__) for module in modules], lambda x: torch.Size(x.shape))


def added_up(plan: Plan) -> dict[int, Tensor]:
    """The gradient of each copy on this rank, by layer; one copy had none."""
    tied, groups = stack(), Groups(60)
    groups.prepare(tied_groups(tied, plan))
    place = position(plan, dist.get_rank())
    assert place is not None
    copies = {layer: tied[layer].by_name()["weight"] for layer in SHARING if layer in plan.device_layers(place.device)}
    for layer, parameter in copies.items():
        parameter.grad = None if layer == TAKES_NO_PART else gradient(layer, place.replica)
    TiedWeights(tied, plan, place, groups).add_up()
    groups.close()
    return {layer: parameter.grad for layer, parameter in copies.items() if parameter.grad is not None}

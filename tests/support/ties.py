"""Shared weights with made-up gradients, for the pool."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan
from pipetransformer.models.stack import Layer, LayerStack
from pipetransformer.runtime.gradients import TiedWeights, tied_layers
from pipetransformer.runtime.groups import ProcessGroups

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
    tied, groups = stack(), ProcessGroups(60)
    topology = Topology(plan, dist.get_rank())
    resolved = groups.resolve(topology, "cpu", tied_layers(tied, plan))
    copies = {layer: tied[layer].by_name()["weight"] for layer in SHARING if layer in topology.layers}
    for layer, parameter in copies.items():
        parameter.grad = None if layer == TAKES_NO_PART else gradient(layer, topology.replica)
    TiedWeights(tied, resolved).all_reduce()
    groups.close()
    return {layer: parameter.grad for layer, parameter in copies.items() if parameter.grad is not None}

"""Runs an elementwise optimizer on local shards instead of DTensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from pipetransformer.optim.base import OptimizerSpec


class LocalShardOptimizer(Optimizer):
    """An optimizer over sharded parameters that gives a plain optimizer this rank's shards.

    As DTensors they would take five times as long one by one, and together a second or more whenever the set of
    parameters changes, as it does at each freeze.

    Args:
        shards: For each sharded parameter this rank's shard, on the same memory.
        plain: The optimizer over the shards.

    Attributes:
        plain: The optimizer over the shards.
        state: By sharded parameter, as that of any optimizer; its tensors are those of this rank's shard.
    """

    def __init__(self, shards: dict[Parameter, Parameter], plain: Optimizer) -> None:
        super().__init__([{"params": list(shards)}], {})
        self._shards, self.plain = shards, plain
        self.param_groups = plain.param_groups  # for the rate

    @classmethod
    def build(
        cls, spec: OptimizerSpec, parameters: Mapping[int, Iterable[Parameter]], own_rates: bool = False
    ) -> Optimizer | None:
        """Builds an elementwise optimizer over the trainable ones of the layers' sharded parameters, or ``None``."""
        assert spec.is_elementwise, f"{type(spec).__name__} needs whole parameters"
        trainable = {layer: [p for p in own if p.requires_grad] for layer, own in parameters.items()}
        shards = {p: Parameter(_shard(p.detach())) for own in trainable.values() for p in own}
        plain = spec.build_layers({layer: [shards[p] for p in own] for layer, own in trainable.items()}, own_rates)
        return None if plain is None else cls(shards, plain)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter, shard in self._shards.items():
            shard.data = _shard(parameter)
            shard.grad = None if parameter.grad is None else _shard(parameter.grad)
            if parameter in self.state:
                self.plain.state[shard] = self.state[parameter]
        loss = self.plain.step(closure)
        for parameter, shard in self._shards.items():
            self.state[parameter] = self.plain.state[shard]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter, shard in self._shards.items():
            parameter.grad = shard.grad = None


def _shard(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()

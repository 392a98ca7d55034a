"""Updates shards as the plain tensors that they are, where an update does not look beyond one number of a parameter."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from pipetransformer.runtime.parts import local_part

Groups = list[dict[str, Any]]


class Shardwise(Optimizer):
    """An optimizer over sharded parameters that hands a plain one this rank's shards.

    As sharded tensors they would take five times as long one by one, and together a second or more whenever the set
    of parameters changes, as it does at each freeze.

    Args:
        groups: Of sharded parameters.
        build: Makes the plain optimizer over groups.

    Attributes:
        state: By sharded parameter, as that of any optimizer, of this rank's shard.
    """

    def __init__(self, groups: Groups, build: Callable[[Groups], Optimizer]) -> None:
        super().__init__([dict(group) for group in groups], {})
        self._shards = {p: torch.nn.Parameter(local_part(p.detach())) for group in groups for p in group["params"]}
        self._plain = build([group | {"params": [self._shards[p] for p in group["params"]]} for group in groups])
        self.param_groups = self._plain.param_groups  # for the rate

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter, shard in self._shards.items():
            shard.data = local_part(parameter)
            shard.grad = None if parameter.grad is None else local_part(parameter.grad)
            if parameter in self.state:
                self._plain.state[shard] = self.state[parameter]
        loss = self._plain.step(closure)
        for parameter, shard in self._shards.items():
            self.state[parameter] = self._plain.state[shard]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter, shard in self._shards.items():
            parameter.grad = shard.grad = None

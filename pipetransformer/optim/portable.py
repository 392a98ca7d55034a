"""An optimizer whose memory lies beside each parameter, in tensors, so that a transition can move it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from pipetransformer.optim.traits import Build, Traits

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


class PortableOptimizer(Optimizer):
    """Runs an optimizer that keeps numbers in its state, or counts steps in its parameter groups.

    Between two steps all of it lies in the state of the parameter that it belongs to, as tensors. So a count moves with
    the layer, and a layer that starts to train later starts to count then::

        inside   param_groups[i]["step"] = 3        state[p] = {"exp_avg": ..., "age": 3}
        outside                                     state[p] = {"exp_avg": ..., "age": tensor(3), "step": tensor(3)}

    Args:
        build: Builds the optimizer.
        groups: The parameter groups. Where the optimizer counts in its groups, each parameter gets one.
        traits: Of the optimizer.
    """

    def __init__(self, build: Build, groups: list[dict[str, Any]], traits: Traits) -> None:
        if traits.group_keys:
            groups = [group | {"params": [parameter]} for group in groups for parameter in group["params"]]
        plain = build(groups)
        super().__init__([{"params": [p for group in groups for p in group["params"]]}], {})
        self._plain, self._numbers = plain, traits.numbers
        self._group_keys = traits.group_keys
        self.param_groups = plain.param_groups  # for the rate
        self._fresh = [{key: group[key] for key in traits.group_keys if key in group} for group in plain.param_groups]

    @classmethod
    def wrap(cls, build: Build, groups: list[dict[str, Any]], traits: Traits) -> Optimizer:
        """Builds an optimizer that a transition can move; one that needs no wrapper stays as it is."""
        return cls(build, groups, traits) if traits.numbers or traits.group_keys else build(groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, fresh in zip(self.param_groups, self._fresh, strict=True):
            for parameter in group["params"]:
                self._unpack(group, fresh, parameter)
        loss = self._plain.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._pack(group, parameter)
        return loss

    def _unpack(self, group: dict[str, Any], fresh: dict[str, Any], parameter: Parameter) -> None:
        state = {key: self._as_given(key, value) for key, value in self.state.get(parameter, {}).items()}
        for key in self._group_keys:
            group.pop(key, None)
        group.update(fresh)
        group.update({key: _copy(state.pop(key)) for key in self._group_keys if key in state})
        self._plain.state.pop(parameter, None)
        if state:
            self._plain.state[parameter] = state

    def _pack(self, group: dict[str, Any], parameter: Parameter) -> None:
        values = {**self._plain.state.get(parameter, {}), **{key: group[key] for key in self._group_keys}}
        self.state[parameter] = {key: self._as_tensor(key, value) for key, value in values.items()}

    def _as_given(self, key: str, value: Tensor) -> Any:
        return self._numbers[key](value.item()) if key in self._numbers else value

    def _as_tensor(self, key: str, value: Any) -> Tensor:
        return torch.tensor(value, dtype=_DTYPES[self._numbers[key]]) if key in self._numbers else value


def _copy(count: Any) -> Any:
    """Returns a count that may be raised in place, also for a parameter without a gradient, which does not count."""
    return count.clone() if isinstance(count, Tensor) else count

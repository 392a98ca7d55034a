"""Torch's fused kernels for AdamW and SGD: one pass over weights, gradients and moments in place of one per term.

They keep what a checkpoint and a move carry: the same tensors under the same keys. Two things are different. AdamW's
count of steps lies on the device, beside the parameter. And a step can be dropped on the device, by a flag that the
host does not have to read::

    optimizer.found_inf = 1.0    weights, moments and counts stay as they are
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from pipetransformer.optim.averaging import COUNT
from pipetransformer.optim.sharded import LocalShardOptimizer

DEVICES = frozenset({"cpu", "cuda"})
"""Device types whose fused kernels are used. They round otherwise than plain ones by a unit in the last place. On a CPU
the vocabulary of BERT, 12 million numbers, takes 16 ms in place of 130: no term gets memory of its own."""
_BUFFER = "momentum_buffer"
_begin_at_zero: WeakSet[Optimizer] = WeakSet()


def may_fuse(groups: list[dict[str, Any]]) -> bool:
    """Returns ``True`` where fused kernels can update all parameters."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(each.device.type in DEVICES and each.is_floating_point() for each in parameters)


def begin_buffers_at_zero(optimizer: SGD) -> None:
    """Makes momentum of a fused SGD begin at zero, before each step in which a parameter has none yet.

    The first step then adds the gradient to zero, which is what torch does without dampening. Torch's own fused kernel
    takes either all parameters at their first step or none, and leaves memory as it finds it in a step that is
    dropped; a layer that trains again begins later than others.
    """

    def fill(own: Optimizer, *_: Any) -> None:
        for group in own.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                if parameter.grad is not None and own.state[parameter].get(_BUFFER) is None:
                    own.state[parameter][_BUFFER] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    optimizer.register_step_pre_hook(fill)
    _begin_at_zero.add(optimizer)


def droppable(optimizer: Optimizer | None) -> Optimizer | None:
    """Returns the optimizer of torch whose steps a flag on the device drops, itself or inside; ``None`` without."""
    if isinstance(optimizer, LocalShardOptimizer):
        optimizer = optimizer.plain
    is_fused = optimizer is not None and all(group.get("fused") for group in optimizer.param_groups)
    return optimizer if is_fused and (type(optimizer) is AdamW or optimizer in _begin_at_zero) else None


def place_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Places a parameter's scalars where an optimizer wants them; other tensors stay where they are.

    Args:
        optimizer: Goes on with them.
        tensors: The state of one parameter by key, of this or another optimizer of the kind.
        device: That of the parameter.
    """
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    place = device if on_device else torch.device("cpu")
    return {key: value if value.ndim else value.to("cpu" if key == COUNT else place) for key, value in tensors.items()}

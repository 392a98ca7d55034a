"""Measures the update of parameters at the end of a step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.profiling.memory import peak_update_bytes
from pipetransformer.profiling.timing import timed, typical, until_settled
from pipetransformer.runtime.gradients import squared_gradient_norms, unscale_and_clip

SMALL = 64, 64  # of a matrix whose update takes next to nothing


class IdleUpdate(NamedTuple):
    """The update of next to nothing.

    Attributes:
        seconds: The bookkeeping that all layers have together.
        together: The fraction of the bytes that an update allocates for the moment, which it does for all parameters
            at once; the rest is for one at a time.
    """

    seconds: float
    together: float


def measure_idle_update(optimizer: OptimizerSpec, device: torch.device, has_parts: bool = False) -> IdleUpdate:
    """Measures the seconds of an update of one number, and the bytes of that of one and of two small matrices."""

    def zeros(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]

    def num_bytes(*shapes: tuple[int, ...]) -> int:
        parameters = zeros(shapes)
        built = _build(parameters, optimizer, has_parts)
        assert built is not None, "all of them train"
        return peak_update_bytes(_whole_update(parameters, built, optimizer.clip_norm))

    one, two = num_bytes(SMALL), num_bytes(SMALL, SMALL)
    together = min(1.0, max(0.0, two / one - 1)) if one else 0.0
    return IdleUpdate(measure_update(zeros([(1,)]), optimizer, has_parts).seconds, together)


class Update(NamedTuple):
    """An update of parameters.

    Attributes:
        seconds: With norms and clipping.
        num_bytes: The most that it allocates at a time.
        counter_bytes: Numbers that the optimizer keeps of each parameter.
    """

    seconds: float
    num_bytes: int
    counter_bytes: int


def measure_update(parameters: list[nn.Parameter], spec: OptimizerSpec, has_parts: bool) -> Update:
    """Measures norms, clipping and the optimizer's step; their bookkeeping included, which is one for all layers.

    Args:
        has_parts: Other ranks of a mesh have parts of the parameters.
    """
    optimizer = _build(parameters, spec, has_parts)
    if optimizer is None:
        return Update(0.0, 0, 0)
    update, device = _whole_update(parameters, optimizer, spec.clip_norm), parameters[0].device
    update()  # makes the optimizer's state
    measured = until_settled(lambda: timed(update, device)[0], lambda seconds: seconds)
    num_bytes = peak_update_bytes(update)
    for parameter in parameters:
        parameter.grad = None
    values = (value for state in optimizer.state.values() for value in state.values())
    counter_bytes = sum(value.nbytes for value in values if isinstance(value, Tensor) and not value.ndim)
    return Update(typical(measured), num_bytes, counter_bytes)


def _build(parameters: list[nn.Parameter], spec: OptimizerSpec, has_parts: bool) -> Optimizer | None:
    return spec.build_layers({0: parameters}, sum_over_parts=_of_one_part if has_parts else None)


def _whole_update(parameters: list[nn.Parameter], optimizer: Optimizer, clip_norm: float | None) -> Callable[[], None]:
    """Gives parameters a gradient, and returns norms, clipping and the optimizer's step as a function."""
    own, device, total_norm = {0: parameters}, parameters[0].device, 2 * (clip_norm or 1.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def update() -> None:
        squared_gradient_norms(own, 1, device).tolist()
        unscale_and_clip(own, total_norm, clip_norm, loss_scale=1.0)
        optimizer.step()

    return update


def _of_one_part(_: Sequence[Tensor], numbers: Tensor) -> Tensor:
    """Returns numbers of parameters as if no other rank had parts of them; the exchange is counted elsewhere."""
    return numbers

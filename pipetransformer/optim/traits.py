"""Properties of an optimizer that the arrangement of a run depends on, measured on small parameters.

A transition moves parameters one by one, each with its own optimizer state. FSDP gives an optimizer a part of the rows
of a parameter. So the questions are whether the update of a parameter depends on it alone, whether the update of a
number does, and where the optimizer keeps what it remembers.
"""

import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from pipetransformer.errors import UserError

Build = Callable[[list[dict[str, Any]]], Optimizer]
"""Builds an optimizer over parameter groups."""
RATE, WEIGHT_DECAY = 0.01, 0.1
SHAPES = (256, 160), (256,), (8, 3, 4, 4)
"""Sizes of a linear layer, a bias and a convolution; above those from which on optimizers keep factored moments."""


@dataclass(frozen=True)
class Traits:
    """Measured properties of an optimizer.

    Attributes:
        state_factor: Bytes of optimizer state per byte of parameters, of a linear layer.
        is_elementwise: The update of a number depends on no other number of its parameter.
        numbers: State of a parameter that is no tensor, by key.
        group_keys: State that the optimizer keeps in parameter groups, by key.
    """

    state_factor: float
    is_elementwise: bool
    numbers: dict[str, type]
    group_keys: tuple[str, ...]


def measure(build: Build, name: str) -> Traits:
    """Measures an optimizer.

    Args:
        build: Builds it.
        name: For messages, as the user writes it.

    Raises:
        UserError: It cannot train layers that move between devices, with the reason.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again where it is built for the run
        try:
            return _measure(build, name)
        except UserError:
            raise
        except Exception as error:  # an optimizer may raise whatever it likes
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"{name} does not train a linear layer with a bias and a convolution: {reason}") from error


def _measure(build: Build, name: str) -> Traits:
    _refuse(build, name)
    begun = [_draw(shape, seed) for seed, shape in enumerate(SHAPES)]
    alone = [_train(build, [each]) for each in begun]
    keys = tuple(sorted({key for run in alone for key in run.group_keys}))
    together = _train(build, begun, apart=bool(keys))
    if not all(map(_equal, together.weights, (run.weights[0] for run in alone))):
        raise UserError(
            f"{name} updates a parameter by other parameters or by chance: the result would depend on the plan; "
            "choose another optimizer, or options without that, as optim.options={max_grad_norm: null} of lamb"
        )
    numbers = {key: kind for run in alone for key, kind in run.kinds(keys).items() if kind is not Tensor}
    if unknown := sorted(key for key, kind in numbers.items() if kind not in (bool, int, float)):
        raise UserError(f"{name} keeps a {numbers[unknown[0]].__name__} as its state {unknown[0]}; it cannot be moved")
    return Traits(_state_factor(build), _is_elementwise(build, begun, alone), numbers, keys)


def _refuse(build: Build, name: str) -> None:
    optimizer = build([{"params": [_draw((4, 4), 0)], "weight_decay": WEIGHT_DECAY}])
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(f"{name} takes the loss several times in a step, by a closure, and a pipeline runs it once")
    if getattr(optimizer, "is_second_order", False):
        raise UserError(f"{name} takes second derivatives of the loss, which pipelines do not compute")
    if any(isinstance(value, random.Random | torch.Generator) for value in vars(optimizer).values()):
        raise UserError(f"{name} draws random numbers for all parameters in turn: they would depend on the plan")


@dataclass
class _Run:
    """A training of a few parameters.

    Attributes:
        weights: The parameters at its end.
        group_keys: Keys of the parameter groups that have changed or come.
    """

    optimizer: Optimizer
    weights: list[Tensor]
    group_keys: set[str]

    def kinds(self, group_keys: Iterable[str]) -> dict[str, type]:
        """Returns the type of each value that the optimizer remembers."""
        values = {key: group[key] for group in self.optimizer.param_groups for key in group_keys}
        values |= {key: value for state in self.optimizer.state.values() for key, value in state.items()}
        return {key: Tensor if isinstance(value, Tensor) else type(value) for key, value in values.items()}


def _train(build: Build, begun: list[Tensor], apart: bool = False) -> _Run:
    """Takes four steps.

    Args:
        begun: The parameters to begin with, each with gradients of its own.
        apart: Gives each parameter its own group.
    """
    parameters = [Parameter(each.clone()) for each in begun]
    groups = [[each] for each in parameters] if apart else [parameters]
    optimizer = build([{"params": group, "weight_decay": WEIGHT_DECAY} for group in groups])
    before = [dict(group) for group in optimizer.param_groups]
    for step in range(4):
        torch.default_generator.manual_seed(len(parameters))  # torch.manual_seed would seed the GPUs as well
        for parameter in parameters:
            parameter.grad = _gradient(parameter, step)
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.step()
    changed = {
        key
        for old, new in zip(before, optimizer.param_groups, strict=True)
        for key in new.keys() - {"params", "lr"}
        if key not in old or new[key] is not old[key]
    }
    return _Run(optimizer, [each.detach() for each in parameters], changed)


def _draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gradient(parameter: Tensor, step: int) -> Tensor:
    """Returns a gradient for a step: along the weights, small and nearly orthogonal to them, large, and any.

    Optimizers clip and project some of them. Each row depends on that row alone, so that halves get halves.
    """
    rows = parameter.detach().flatten(1) if parameter.ndim > 1 else parameter.detach()[:, None]
    other = rows.roll(1, dims=1) if rows.shape[1] > 1 else rows.sin()
    orthogonal = other - rows * (other * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
    drawn = (rows * 37.7).sin()
    return (rows + drawn, 1e-3 * orthogonal + 1e-6 * drawn, 1e3 * drawn, drawn)[step].reshape(parameter.shape)


def _is_elementwise(build: Build, begun: list[Tensor], alone: list[_Run]) -> bool:
    """Returns whether halves of each parameter train as the whole one does, with state of its shape."""
    for whole, run in zip(begun, alone, strict=True):
        halves = [_train(build, [half]).weights[0] for half in whole.chunk(2)]
        (state,) = run.optimizer.state.values() or [{}]
        shapes = {tuple(value.shape) for value in state.values() if isinstance(value, Tensor) and value.ndim}
        if not _equal(torch.cat(halves), run.weights[0]) or shapes - {tuple(whole.shape)}:
            return False
    return True


def _equal(one: Tensor, two: Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-10, atol=1e-12)


def _state_factor(build: Build) -> float:
    weight = _draw(SHAPES[0], 0).float()
    run = _train(build, [weight])
    values = (value for state in run.optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.ndim) / weight.nbytes

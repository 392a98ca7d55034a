"""A first step with a learning rate for each layer."""

from collections.abc import Sequence
from unittest import mock

from torch import Tensor

from pipetransformer.autopipe.plan import Plan
from pipetransformer.optim.base import OptimizerSpec
from support.cases import Case
from support.trainings import build, go, ids_of

_build_layers = OptimizerSpec.build_layers


def step_once(case: Case, plan: Plan, rate: float | Sequence[float], folder: str) -> dict[str, Tensor]:
    """Every rank calls it. Returns the weights after the first step, by name, on rank 0."""
    runtime, loader, groups = build(case, folder, own_rates=True)
    go(runtime, loader, plan)
    runtime.train_step(loader, ids_of(case, 0), 0, rate)
    loader.close()
    weights = runtime.weights() or {}
    groups.close()
    return weights


def step_with_one_group(case: Case, plan: Plan, rate: float | Sequence[float], folder: str) -> dict[str, Tensor]:
    """The same, with all layers in one group of the optimizer."""
    with mock.patch.object(OptimizerSpec, "build_layers", lambda self, parameters, _: _build_layers(self, parameters)):
        return step_once(case, plan, rate, folder)

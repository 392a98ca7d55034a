"""The end of a step: its gradient is judged by its norms, then clipped and used, or dropped, on every rank alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pipetransformer.errors import StepRefused
from pipetransformer.optim.averaging import AVERAGE
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.optim.fused import droppable
from pipetransformer.runtime import gradients
from pipetransformer.runtime.agreement import Agreement
from pipetransformer.runtime.device_update import NormVerdict
from pipetransformer.runtime.engine import Engine
from pipetransformer.runtime.fsdp import local_part
from pipetransformer.runtime.result import StepResult

if TYPE_CHECKING:
    from pipetransformer.runtime.elastic import ElasticRuntime

Rate = float | Sequence[float]


class WeightUpdate:
    """Updates the weights of a runtime.

    Args:
        runtime: Whose engine, optimizer and observer are those of the plan in force.
        spec: Settings of the optimizer.
        agreement: Of all ranks on a step.
    """

    def __init__(self, runtime: ElasticRuntime, spec: OptimizerSpec, agreement: Agreement) -> None:
        self._runtime, self._spec, self._agreement = runtime, spec, agreement

    def after(self, told: Tensor, rate: Rate, max_norm: float) -> StepResult:
        """Ends a step whose gradients are there. See :meth:`~pipetransformer.runtime.elastic.ElasticRuntime.step`.

        Args:
            told: What the engine's step has returned.

        Raises:
            StepRefused: On every rank alike, before any weight changes.
        """
        runtime, loss_scale = self._runtime, self._runtime.loss_scale
        own = gradients.squared_gradient_norms(runtime.measured, runtime.num_layers, runtime.device)
        squared, told, is_summed = self._summed(own, told)
        verdict = NormVerdict(loss_scale.unscaled(squared), max_norm)
        sums = self._agreement.sums(told, verdict.flags, is_summed)
        if (fused := self._dropping) is not None:
            self._on_device(fused, verdict, loss_scale.value, rate)
            return self._agreement.judge(sums, *verdict.read())
        try:
            result = self._agreement.judge(sums, *verdict.read())
        except StepRefused:
            self._clear_gradients()
            raise
        self._on_host(result, rate)
        return result

    def _summed(self, own: Tensor, told: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Sums the norms, and in the same all-reduce what the ranks tell, where both are summed over the world.

        Returns:
            The squared norms of the whole gradient; what is told, and whether it is the sum over the world.
        """
        engine, group = self._engine, self._engine.norm_group
        if engine.sums_for_world or group.size() < dist.get_world_size():
            return gradients.all_reduce_squared_norms(own, group), told, engine.sums_for_world
        both = gradients.all_reduce_squared_norms(torch.cat([own, told]), group)
        return both[: len(own)], both[len(own) :], True

    @property
    def _dropping(self) -> Optimizer | None:
        """The optimizer that drops the step by a flag on the device; ``None`` where the host reads the norms first."""
        runtime = self._runtime
        is_measured = runtime.observer is not None and runtime.observer.is_due
        is_elsewhere = runtime.resident.home != runtime.device  # weights in host memory would not wait for the flag
        return None if is_measured or is_elsewhere else droppable(runtime.optimizer)

    @property
    def _engine(self) -> Engine:
        assert self._runtime.engine is not None, "an idle rank takes no step"
        return self._runtime.engine

    def _on_device(self, fused: Optimizer, verdict: NormVerdict, loss_scale: float, rate: Rate) -> None:
        """Updates where the device finds the gradient good; the host does not know yet."""
        with self._runtime.recorder.span("optimizer"), verdict.dropping(fused):
            self._clip(verdict.total_norm, loss_scale)
            self._set_rates(rate)
            self._step_optimizer()
            self._clear_gradients()

    def _on_host(self, result: StepResult, rate: Rate) -> None:
        runtime = self._runtime
        # with an observer, a rank without an optimizer still joins the sums over the ranks
        if runtime.optimizer is None and runtime.observer is None:
            return
        with runtime.recorder.span("optimizer"):
            if not result.skipped:
                factor = self._clip(result.total_norm, result.loss_scale)
                self._set_rates(rate)
                if runtime.observer is None:
                    self._step_optimizer()
                else:
                    runtime.observer.around(runtime, factor.item(), self._step_optimizer)
            self._clear_gradients()

    def _clip(self, total_norm: Tensor | float, loss_scale: float) -> Tensor:
        return gradients.unscale_and_clip(self._engine.active_parameters, total_norm, self._spec.clip_norm, loss_scale)

    def _set_rates(self, rate: Rate) -> None:
        rates = self._spec.rates(rate, self._runtime.num_layers) if isinstance(rate, float | int) else rate
        for group in self._runtime.optimizer.param_groups if self._runtime.optimizer else ():
            group["lr"] = rates[group["layer"]]

    def _step_optimizer(self) -> None:
        if self._runtime.optimizer is not None:
            self._runtime.optimizer.step()

    def _clear_gradients(self) -> None:
        if self._runtime.optimizer is not None:
            self._runtime.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def swap_averages(optimizer: Optimizer | None) -> None:
    """Exchanges the parameters' numbers for their average, where the optimizer keeps one."""
    for parameter, state in optimizer.state.items() if optimizer else ():
        if AVERAGE in state:
            own, average = local_part(parameter), local_part(state[AVERAGE])
            before = own.clone()
            own.copy_(average)
            average.copy_(before)

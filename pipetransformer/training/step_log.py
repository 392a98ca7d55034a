"""The log of steps, one step behind the training."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.result import StepResult

SHORT_WAIT = 0.05  # of a step's time; a step that waits less for its input counts as one that finds it ready


class StepLog:
    """Reports each step when the next one has ended, so that no rank waits for a loss at the end of a step."""

    def __init__(self, report: Reporter, runtime: ElasticRuntime, timeline: Timeline) -> None:
        self._report, self._runtime, self._timeline = report, runtime, timeline
        self._last: tuple[StepResult, dict[str, Any]] | None = None  # its loss is still being all-reduced
        self._num_steps, self._num_waiting, self._input_wait_s = 0, 0, 0.0

    def note(
        self, step: int, result: StepResult, rate: float, num_samples: int, seconds: float, wait_s: float,
        input_wait_s: float,
    ) -> None:  # fmt: skip
        """Keeps a step until the next :meth:`flush`.

        Args:
            step: Number of the step, from 1 on.
            result: Norms and loss.
            rate: Learning rate.
            num_samples: Samples of the global batch.
            seconds: Duration of the step on this rank.
            wait_s: Part of it in which the rank waited for the cache.
            input_wait_s: Part of it in which the rank read samples, or waited for workers that do.
        """
        plan = self._runtime.plan
        assert plan is not None
        values = {
            "step": step,
            "epoch": step / self._timeline.steps_per_epoch,
            "lr": rate,
            "grad_norm": result.total_norm,
            "step_seconds": seconds,
            "input_wait_seconds": input_wait_s,
            "samples_per_second": num_samples / seconds,
            "num_frozen": plan.num_frozen,
            "num_stages": plan.num_stages,
            "num_replicas": plan.num_replicas,
            "num_idle_devices": dist.get_world_size() - plan.num_devices,
            "cache_level": plan.cache_level,
        }
        waiting = {"cache_wait_seconds": wait_s} if plan.cache_level else {}
        self._last = result, values | self.scaling() | waiting
        self._num_steps += 1
        self._num_waiting += input_wait_s >= SHORT_WAIT * seconds
        self._input_wait_s += input_wait_s

    def flush(self) -> None:
        """Reports the step that is kept, if there is one."""
        if self._last is not None:
            result, values = self._last
            self._report.write("step", loss=result.loss, **values)
            self._last = None

    def input_figures(self) -> dict[str, Any]:
        """Returns this rank's waiting for samples: in all, and the part of the steps that hardly wait."""
        ready = 1 - self._num_waiting / self._num_steps if self._num_steps else None
        return {"wait_seconds": self._input_wait_s, "ready_fraction": ready}

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`input_figures` counts."""
        return {"num_steps": self._num_steps, "num_waiting": self._num_waiting, "wait_seconds": self._input_wait_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values of :meth:`state_dict`."""
        self._num_steps, self._num_waiting = state["num_steps"], state["num_waiting"]
        self._input_wait_s = state["wait_seconds"]

    def scaling(self) -> dict[str, float]:
        """Returns the loss scale of the next step and the steps skipped so far; empty without scaling."""
        if not self._runtime.precision.scales_loss:
            return {}
        scale = self._runtime.loss_scale
        return {"loss_scale": scale.value, "num_skipped_steps": scale.num_skipped}

"""The record of each step."""

from typing import Any

from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime, StepResult


class StepLog:
    """Writes a step when the next one has ended, so that no rank waits for the others' losses at the end of each."""

    def __init__(self, report: Reporter, runtime: ElasticRuntime, timeline: Timeline) -> None:
        self._report, self._runtime, self._timeline = report, runtime, timeline
        self._last: tuple[StepResult, dict[str, Any]] | None = None  # its loss is still under way

    def note(self, step: int, result: StepResult, rate: float, num_samples: int, seconds: float, wait_s: float) -> None:
        """Takes up a step, after :meth:`flush`.

        Args:
            step: Its number, from 1 on.
            num_samples: Of the global batch.
            wait_s: How much of its seconds it waited for the cache.
        """
        plan = self._runtime.plan
        assert plan is not None
        values = {
            "step": step,
            "epoch": step / self._timeline.steps_per_epoch,
            "lr": rate,
            "grad_norm": result.total_norm,
            "step_seconds": seconds,
            "samples_per_second": num_samples / seconds,
            "num_frozen": plan.num_frozen,
            "num_stages": plan.num_stages,
            "num_replicas": plan.num_replicas,
            "cache_level": plan.cache_level,
        }
        waiting = {"cache_wait_seconds": wait_s} if plan.cache_level else {}
        self._last = result, values | self.scaling() | waiting

    def flush(self) -> None:
        """Writes the last step, if that was not done."""
        if self._last is not None:
            result, values = self._last
            self._report.write("step", loss=result.loss, **values)
            self._last = None

    def scaling(self) -> dict[str, float]:
        """The loss scale of the next step, and the steps skipped so far; nothing without scaling."""
        if not self._runtime.precision.scales_loss:
            return {}
        scale = self._runtime.loss_scale
        return {"loss_scale": scale.value, "num_skipped_steps": scale.num_skipped}

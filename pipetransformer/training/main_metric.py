"""The main metric of a run: its value, when it was best, and whether the run has waited long enough for a new best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipetransformer.config.sections import Evaluation
from pipetransformer.data.base import Split
from pipetransformer.metric import sign_of
from pipetransformer.planning.state import TrainState
from pipetransformer.planning.stopping import Patience, check_metric, wanted_metric
from pipetransformer.report.format import BestMetric


class MainMetric:
    """``evaluate.metric`` of a run, the same on every rank.

    Args:
        options: Name the metric and the patience.
        splits: Those that are evaluated, the main one first.
        known: Names of the task's metrics; empty where only an evaluation tells.
        state: Of the run, which holds all values.

    Raises:
        UserError: There is no such split, or it is not scored by this metric.
    """

    def __init__(self, options: Evaluation, splits: Sequence[Split], known: Sequence[str], state: TrainState) -> None:
        self._options, self._splits, self._state = options, splits, state
        self._split, self._name = wanted_metric(options.metric, [split.name for split in splits] or [""])
        if known:
            check_metric(options.metric, self._split, known)

    @property
    def wanted(self) -> dict[str, str | None]:
        """Split and name that the user asks for; no name for the first metric of the split."""
        return {"split": self._split, "name": self._name}

    @property
    def value(self) -> float | None:
        """As it was last measured; ``None`` before the first evaluation."""
        metrics = self._state.metrics.get(self._split, {})
        return metrics.get(self.name) if metrics else None

    @property
    def goodness(self) -> float | None:
        """The value of the present weights with the sign by which more is better; ``None``: they were not scored."""
        if self.value is None or self._state.evaluated_at != self._state.step:
            return None
        return sign_of(self.name) * self.value

    @property
    def name(self) -> str:
        """Its name, which is known from the first evaluation on."""
        return self._name or next(iter(self._state.metrics[self._split]))

    @property
    def best_step(self) -> int | None:
        """Step at which it was best; ``None`` before the first evaluation."""
        return self._state.best_metrics.get(self._split, {}).get("step")

    def take(self, split: str, metrics: dict[str, float]) -> None:
        """Takes the metrics of an evaluated split into the state of the run.

        Raises:
            UserError: It is the main split and has no such metric.
        """
        is_main = split == self._split
        check_metric(self._options.metric if is_main else None, split, [*metrics])
        self._state.metrics[split] = metrics
        if is_main:
            self._state.evaluated_at = self._state.step
        name = self._name if is_main else None
        BestMetric(self._state.best_metrics).update(split, metrics, self._state.step, name)

    def begin_anew(self) -> None:
        """Forgets how long the run has waited for a better value, and the best one where it is of another metric."""
        best = self._state.best_metrics.get(self._split)
        if best is not None and best["name"] != self.name:
            del self._state.best_metrics[self._split]
        self._state.patience = Patience()

    def count_evaluation(self, is_last: bool = False) -> None:
        """Counts an evaluation of all splits, after which the run may have waited long enough.

        Args:
            is_last: The run has come to its end, so that it does not end early.
        """
        if self.value is not None:
            self._state.patience.count(self._options, self.name, self.value)
        if is_last:
            self._state.patience.reason = ""

    def figures(self) -> dict[str, Any]:
        """Returns the metric, its best value, and why the run has ended early, for the summary."""
        figures: dict[str, Any] = {"metric": None}
        if self.value is not None:
            split = next(split for split in self._splits if split.name == self._split)
            about = {"name": self.name, "value": self.value, "split": split.name, "num_samples": split.num_scored}
            at = {"step": self._state.evaluated_at}  # earlier than the last step of a run that was stopped
            figures["metric"] = self._state.metrics[split.name] | about | at  # a metric may have one of these names
            figures["best"] = self._state.best_metrics[split.name]
        if self._state.patience.reason:
            figures["stopped_early"] = {"step": self._state.step, "reason": self._state.patience.reason}
        return figures

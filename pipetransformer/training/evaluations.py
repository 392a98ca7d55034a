"""The evaluations of a run: when one is due, what it measures, and what is judged by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipetransformer.training.evaluate import evaluate
from pipetransformer.training.position import inside

if TYPE_CHECKING:
    from pipetransformer.training.trainer import Trainer


class RunEvaluations:
    """The evaluations of one rank's training loop. Every rank makes the same calls.

    Args:
        trainer: The loop, whose state holds the metrics.

    Attributes:
        is_on: Steps are followed by the evaluations of the section ``evaluate``; else the user evaluates.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.is_on = trainer, True

    def is_due(self, step: int) -> bool:
        """Returns whether every split is scored after ``step`` steps."""
        options, timeline = self._trainer.config.evaluate, self._trainer.timeline
        num_epochs, rest = divmod(step, timeline.steps_per_epoch)
        is_epoch = options.every_epochs is not None and rest == 0 and num_epochs % options.every_epochs == 0
        is_multiple = options.every_steps is not None and step % options.every_steps == 0
        return self.is_on and (is_epoch or is_multiple or step == timeline.num_steps)

    def run_and_judge(self) -> bool:
        """Scores every split, lets the guard judge a freeze, and counts how long there was no new best. Collective.

        Returns:
            True where the guard has rolled the run back.

        Raises:
            LoopLeft: On every rank.
            FreezeHurts: The run ends.
        """
        self.run_or_leave()
        trainer = self._trainer
        if trainer.guard.judge_freeze():
            return True
        trainer.main_metric.count_evaluation(is_last=trainer.state.step >= trainer.timeline.num_steps)
        return False

    def run_or_leave(self) -> None:
        """Scores every split; a signal to any rank leaves it. Collective.

        Raises:
            LoopLeft: On every rank.
        """
        self.run(self._trainer.stops.is_asked)

    def run(self, stops: Callable[[], bool] | None = None) -> dict[str, dict[str, float]]:
        """Scores every split under the current plan. Collective.

        Args:
            stops: Returns on every rank alike whether to leave; ``None`` never asks.

        Returns:
            Metrics by split, equal on every rank.
        """
        trainer = self._trainer
        trainer.flush_log()
        for loader in trainer.components.evaluation:
            start, split = time.perf_counter(), loader.split
            with inside(f"the evaluation of {split.name}", trainer.state.step):
                metrics = evaluate(trainer.runtime, loader, min(trainer.config.batch_size, len(split)), stops)
            trainer.main_metric.take(split.name, metrics)
            trainer.report.write(
                "evaluate",
                step=trainer.state.step,
                epoch=trainer.state.step / trainer.timeline.steps_per_epoch,
                split=split.name,
                num_samples=split.num_scored,
                metrics=metrics,
                seconds=time.perf_counter() - start,
            )
            for callback in trainer.callbacks:
                callback.on_evaluate(trainer, split.name, metrics)
        trainer.state.evaluation_due = False
        trainer.prefetch_anew()  # the cache may be in the middle of an epoch
        return trainer.state.metrics

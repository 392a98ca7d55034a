"""Saves a run and ends it where a rank asks for it: what ranks ask each other, and when they follow.

While steps run, a request travels with the loss, so that asking costs nothing::

    step s      a rank knows of a signal or a due checkpoint, and sends it along with the loss
    step s + 1  every rank reads the loss of step s, and with it the request; saves, and stops where that was asked

Between two steps, in an evaluation or while the cache is filled, ranks ask by an all-reduce of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pipetransformer.errors import Stopped
from pipetransformer.runtime.groups import any_rank
from pipetransformer.runtime.result import NO_REQUESTS, Requests, StepResult
from pipetransformer.training import interrupt

if TYPE_CHECKING:
    from pipetransformer.training.trainer import Trainer


class RunStops:
    """Saves and the end of one rank's training loop. Every rank makes the same calls.

    Args:
        trainer: The loop, whose checkpoints are written.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._last: StepResult | None = None  # the requests of its ranks hold after the next step

    def requests(self) -> Requests:
        """Returns what this rank asks all others for, to be done after the step that follows this one."""
        return Requests(
            save=self._trainer.checkpoints.wants(self._trainer.state.step + 2),
            requeue=interrupt.asks_to_requeue(),
            quit=interrupt.requested() == interrupt.QUIT,
        )

    def follow(self, result: StepResult) -> None:
        """Does what ranks asked for with the loss of the step before.

        Raises:
            Stopped: A signal asked for it, on every rank alike.
        """
        trainer, asked = self._trainer, NO_REQUESTS if self._last is None else self._last.requests
        self._last, stops = result, asked.requeue or asked.quit
        metric, step = trainer.main_metric, trainer.state.step
        wants_best = trainer.config.evaluate.save == "best" and metric.best_step == step
        if trainer.checkpoints.is_due(step, asked.save or stops or wants_best or trainer.is_over):
            trainer.flush_log()
            trainer.checkpoints.save(trainer.state)
        trainer.checkpoints.report_written()
        if stops and not trainer.is_over:
            self._stop(asked.requeue)

    def forget(self) -> None:
        """Drops the requests that came with the last step, where the run goes on from another."""
        self._last = None

    def is_asked(self) -> bool:
        """Returns whether a signal came to any rank, on every rank alike. Collective."""
        return any_rank(interrupt.is_requested(), self._trainer.runtime.device)

    def save_and_stop(self) -> NoReturn:
        """Saves the run between two steps and ends it. Collective.

        Raises:
            Stopped: On every rank.
        """
        trainer, signal = self._trainer, interrupt.requested()
        quits = any_rank(signal == interrupt.QUIT, trainer.runtime.device)
        trainer.flush_log()
        if trainer.config.checkpoint.enabled:
            trainer.checkpoints.save(trainer.state)
        self._stop(not quits)

    def _stop(self, requeue: bool) -> NoReturn:
        self._trainer.flush_log()  # nothing is saved where checkpoints are off
        self._trainer.checkpoints.wait()
        folder = self._trainer.checkpoints.folder
        raise Stopped(requeue, None if folder.newest_step is None else folder.path.parent)

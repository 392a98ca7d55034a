"""How far a run is, how long it will still take, and what it is doing."""

from __future__ import annotations

from pipetransformer.report.reporter import Values
from pipetransformer.report.text import arrangement
from pipetransformer.report.units import duration, number

SMOOTHING = 0.1  # weight of the newest step in the time per step


class Progress:
    """Follows the events of a run.

    Args:
        start: The values of the start event.
    """

    def __init__(self, start: Values) -> None:
        self.num_steps: int = start["num_steps"]
        self._steps_per_epoch: int = start["steps_per_epoch"]
        self._epochs: float = start["epochs"]
        self._num_blocks: int = start["num_blocks"]
        self._plan: Values = start["plan"]
        self._step_s: float | None = None

    def step(self, values: Values) -> None:
        newest = values["step_seconds"]
        self._step_s = newest if self._step_s is None else self._step_s + SMOOTHING * (newest - self._step_s)

    def transition(self, values: Values) -> None:
        """What the steps took before says nothing about the new plan."""
        self._plan, self._step_s = values["after"], None

    def ends_epoch(self, step: int) -> bool:
        return step % self._steps_per_epoch == 0 or step == self.num_steps

    def left(self, step: int) -> str:
        return duration(None if self._step_s is None else self._step_s * (self.num_steps - step))

    def status(self, values: Values) -> str:
        """One line about a step event."""
        frozen = f"{values['num_frozen']}/{self._num_blocks} frozen"
        cached = f", {values['cache_level']} cached" if values["cache_level"] else ""
        return "  ".join(
            [
                f"epoch {values['epoch']:.2f}/{self._epochs:g}",
                f"loss {number(values['loss'])}",
                f"{number(values['samples_per_second'])} samples/s",
                frozen + cached,
                arrangement(self._plan),
            ]
        )

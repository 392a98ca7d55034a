"""Runs whose plans take made-up times, for the pool."""

from pathlib import Path
from unittest import mock

from pipetransformer.autopipe.cost import kind_of
from pipetransformer.planning.history import PlanRecord
from pipetransformer.planning.planner import Planner
from support.jobs import play

CORRECT = Planner.correct


def play_with_step_times(overrides: tuple[str, ...], folder: Path, seconds: dict[str, float]) -> str:
    """Plays a run in which layers take a second per sample by their profile, and steps as told by their kind."""

    def correct(planner: Planner, plan: object, measured_s: float) -> float:
        return CORRECT(planner, plan, measured_s)  # type: ignore[arg-type]

    def told(record: PlanRecord) -> float | None:
        return seconds[kind_of(record.plan.devices)] if record.step_seconds else None

    by_time = mock.patch.object(PlanRecord, "typical_step_s", property(told))
    with by_time, mock.patch("support.jobs.corrected_by", correct):
        return play(overrides, folder, made_up_times=True)

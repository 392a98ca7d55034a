"""A run whose state goes through JSON in the middle, as it would through a checkpoint."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pipetransformer.planning.history import RunHistory
from pipetransformer.planning.state import TrainState
from pipetransformer.report.reporter import Reporter
from pipetransformer.report.sinks import Sink, Values
from pipetransformer.runtime.precision import LossScale
from pipetransformer.runtime.signals.collect import SignalCollectors
from pipetransformer.training.build import prepare
from pipetransformer.training.trainer import Trainer
from support.jobs import composed

Run = tuple[list[float], list[Values], list[tuple[int, int, int]], dict[str, Any]]
"""Losses; decisions; step, frozen prefix and number of steps of each plan; the loss scale at the end."""


class Decisions(Sink):
    def __init__(self) -> None:
        self.found: list[Values] = []

    def write(self, event: str, values: Values) -> None:
        if event == "decision":
            self.found.append(values)

    def close(self) -> None:
        pass


def run_through_json(
    overrides: tuple[str, ...], folder: Path, at_step: int | None, forgotten: str | None = None
) -> Run | str:
    """Restores the state at a step, but for one forgotten value; gives what the run did, or why it could not go on."""
    try:
        return _run(overrides, folder, at_step, forgotten)
    except (ValueError, IndexError) as error:
        return str(error)


def _run(overrides: tuple[str, ...], folder: Path, at_step: int | None, forgotten: str | None) -> Run | str:
    config, decisions = composed(overrides), Decisions()
    with ExitStack() as closing:
        report = Reporter([decisions])
        trainer = Trainer(config, prepare(config, torch.device("cpu"), folder, closing, report), report, folder)
        trainer.start()
        steps = []
        for result in trainer:
            steps.append(result.loss)
            if len(steps) == 3:
                trainer.runtime.loss_scale.value /= 128  # as if it had overflowed
            if trainer.state.step == at_step and len(steps) == at_step:
                restore(trainer, forgotten)
            if len(steps) > 2 * trainer.timeline.num_steps:
                return "the run does not end"
        records = [(r.step, r.plan.num_frozen, len(r.step_seconds)) for r in trainer.state.history.entries]
        return steps, decisions.found, records, trainer.runtime.loss_scale.state_dict()


def restore(trainer: Trainer, forgotten: str | None) -> None:
    """Writes the state, makes every value of it a fresh one, and reads it back."""
    state = trainer.state
    saved = json.loads(json.dumps(state.state_dict()))
    fresh = TrainState(
        seed=state.seed,
        history=RunHistory(trainer.num_blocks, may_cache=False),
        loss_scale=LossScale(trainer.runtime.precision),
        signals=SignalCollectors(trainer.config.freeze.signals, trainer.signals.context),
        steps_per_epoch=state.steps_per_epoch,
    )
    blank: dict[str, Any] = json.loads(json.dumps(fresh.state_dict()))
    state.load_state_dict(blank)
    state.load_state_dict(saved if forgotten is None else saved | {forgotten: blank[forgotten]})

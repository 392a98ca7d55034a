"""Runs of a freeze policy, whole or in two parts, with the decisions that they took."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pipetransformer as pt
from pipetransformer.config.sections import Checkpointing, Resume
from support.jobs import composed, with_made_up_times


def run_policy(overrides: tuple[str, ...], folder: Path, every_steps: int | None = None) -> list[float]:
    """One rank of a run that starts, or goes on from its newest checkpoint; it keeps one after so many steps each."""
    checkpoint = Checkpointing(every_steps=every_steps, every_minutes=None, keep=1000, keep_best=0)
    config = replace(composed(overrides), checkpoint=checkpoint, resume=Resume(run="auto"))
    with with_made_up_times():
        trainer = pt.ElasticTrainer.from_config(config, folder)
    with trainer:
        return [result.loss for result in trainer]


def plain(decision: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what must be the same whatever the arrangement is."""
    return tuple(decision[name] for name in ("step", "num_frozen_before", "num_frozen", "bound"))

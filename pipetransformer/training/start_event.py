"""The first event of a run, and of each process that goes on with it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipetransformer.report.sinks import EventName
from pipetransformer.training.trainer import Trainer


def report_start(trainer: Trainer, run_dir: Path) -> None:
    """Reports that a run has started, or has gone on from a checkpoint, with what is known of it by then."""
    config, components, record = trainer.config, trainer.components, trainer.state.history.entries[-1]
    resumed = components.resumed
    event: EventName = "start" if resumed is None else "resume"
    about: dict[str, Any] = {}
    if resumed is not None:
        folder, lost = resumed.checkpoint.folder, trainer.num_steps_lost
        about = {"step": trainer.state.step, "checkpoint": str(folder), "num_steps_lost": lost}
        about["num_resumes"] = trainer.state.num_resumes
        about["best"] = trainer.state.best_metrics
        about["num_steps_rolled_back"] = trainer.state.guard.num_steps_lost
    trainer.report.write(
        event,
        **about,
        run_dir=str(run_dir),
        model=config.model.name,
        dataset=config.dataset.name,
        task=components.data.task.name,
        data_note=components.data.note,
        main_metric=trainer.main_metric.wanted,
        head=asdict(components.data.task.head),
        input_shape=list(components.data.input_shape),
        num_blocks=trainer.num_blocks,
        num_parameters=components.num_parameters,
        world_size=dist.get_world_size(),
        batch_size=config.batch_size,
        lr=components.optim.peak,
        lr_reached=components.optim.highest_rate(trainer.timeline.num_steps),
        lr_by_model=components.optim.peak not in (config.optim.lr, config.optim.scratch_lr),
        epochs=config.epochs,
        steps_per_epoch=trainer.timeline.steps_per_epoch,
        num_steps=trainer.timeline.num_steps,
        plan=record.as_dict(),
        reason=record.reason,
        **({"estimate": trainer.estimate} if trainer.estimate else {}),
        cache=components.cache_setup.outlook(components.planner.profile, components.train.source),
    )

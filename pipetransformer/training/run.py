"""One rank of a run, from its configuration to its summary."""

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.config.names import in_options
from pipetransformer.config.schema import Config
from pipetransformer.errors import Diverged, NotSaved
from pipetransformer.report.reporter import Reporter, open_report
from pipetransformer.report.run_folder import SUMMARY, write_json
from pipetransformer.training.build import prepare
from pipetransformer.training.save import places, save_model
from pipetransformer.training.trainer import Trainer


def run_rank(
    config: Config, run_dir: Path, device: torch.device, plain: dict[str, Any], sweep: str | None
) -> dict[str, Any]:
    """Runs one rank of a job in a world that is open.

    Returns:
        The summary on rank 0, an empty one on the others.
    """
    with ExitStack() as closing:
        report = Reporter()
        if dist.get_rank() == 0:
            report = open_report(config.logger, run_dir, plain, sweep, config.log_every_s, config.log_every_steps)
        closing.callback(report.close)
        components = prepare(config, device, run_dir, closing, report)
        return _train(Trainer(config, components, report, run_dir), run_dir)


def _train(trainer: Trainer, run_dir: Path) -> dict[str, Any]:
    gc.freeze()  # what stands now stays, which the first plan does not; transitions collect the rest quickly
    trainer.start()
    status, error = "failed", None
    try:
        _report_start(trainer, run_dir)
        trainer.freeze_at_start()
        for _ in trainer:
            pass
        status = "completed"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Diverged as diverged:
        status, error = "diverged", in_options(diverged)
        raise
    except BaseException as failure:
        error = f"{type(failure).__name__}: {in_options(failure)}"
        raise
    finally:
        trainer.cache_session.release()
        summary = _finish(trainer, run_dir, status, error)
    return summary


def _report_start(trainer: Trainer, run_dir: Path) -> None:
    config, components, record = trainer.config, trainer.components, trainer.state.history.entries[0]
    trainer.report.write(
        "start",
        run_dir=str(run_dir),
        model=config.model.name,
        dataset=config.dataset.name,
        task=components.data.task.name,
        num_blocks=trainer.num_blocks,
        num_parameters=components.stack.num_parameters,
        world_size=dist.get_world_size(),
        batch_size=config.batch_size,
        epochs=config.epochs,
        steps_per_epoch=trainer.timeline.steps_per_epoch,
        num_steps=trainer.timeline.num_steps,
        plan=record.as_dict(),
        reason=record.reason,
        cache=components.storage.outlook(components.planner.profile, components.train.source),
    )


def _finish(trainer: Trainer, run_dir: Path, status: str, error: str | None) -> dict[str, Any]:
    """Writes the summary, and saves the weights where all ranks can still talk."""
    state = trainer.runtime.weights() if status in ("completed", "diverged") else None
    if dist.get_rank() != 0:
        return {}
    summary = {"status": status} | ({"error": error} if error else {}) | trainer.summary()
    write_json(run_dir / SUMMARY, summary)  # first, so that a model that finds no room costs the model alone
    if state is not None:
        _save_model(trainer, run_dir, state, summary)
    trainer.report.write("summary", **summary)
    return summary


def _save_model(trainer: Trainer, run_dir: Path, state: dict[str, Tensor], summary: dict[str, Any]) -> None:
    try:
        folder = save_model(trainer.config.model, trainer.components.stack, state, places(run_dir))
    except NotSaved as error:
        summary["error"] = "; ".join(filter(None, (summary.get("error"), str(error))))
        write_json(run_dir / SUMMARY, summary)
        if summary["status"] == "completed":  # otherwise what ended the run is told
            trainer.report.write("summary", **summary)
            raise
    else:
        if folder.parent != run_dir:
            trainer.report.write("warning", message=f"the model is in {folder}: {run_dir} has no room for it")

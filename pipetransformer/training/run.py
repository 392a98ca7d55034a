"""One rank of a run from its preparation to its summary."""

import gc
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipetransformer.config.checks import warnings
from pipetransformer.config.names import in_options
from pipetransformer.config.options import Config
from pipetransformer.errors import Diverged
from pipetransformer.report.open import open_report
from pipetransformer.report.reporter import Reporter
from pipetransformer.report.run_folder import SUMMARY, write_json
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import Groups
from pipetransformer.training.build import RunComponents, prepare
from pipetransformer.training.task import objective
from pipetransformer.training.trainer import Trainer

MODEL_FOLDER = "model"


def run_rank(
    config: Config, run_dir: Path, device: torch.device, plain: dict[str, Any], sweep: str | None
) -> dict[str, Any]:
    """Runs one rank of a job in a world that is open; the environment says which of its node."""
    with ExitStack() as closing:
        components = prepare(config, device, run_dir, closing)
        report = Reporter()
        if dist.get_rank() == 0:
            report = open_report(config.logger, config.log_every_steps, run_dir, plain, sweep)
        closing.callback(report.close)
        return _train(config, components, run_dir, report)


def _train(config: Config, components: RunComponents, run_dir: Path, report: Reporter) -> dict[str, Any]:
    groups = Groups(config.parallel.timeout_s)
    runtime = ElasticRuntime(
        components.stack,
        groups,
        objective(components.data.task, components.data.num_outputs),
        config.optim.build,
        config.optim.clip_norm,
        components.device,
        components.precision,
    )
    for text in (*warnings(config), *components.storage.notes):
        report.write("warning", message=text)
    trainer = Trainer(config, components, runtime, report, run_dir)
    gc.freeze()  # what stands now stays, which the first plan does not; transitions collect the rest quickly
    trainer.start()
    status, error = "failed", None
    try:
        _report_start(config, components, trainer, run_dir, report)
        trainer.freeze_at_start()
        trainer.run()
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
        summary = _finish(config, components, trainer, run_dir, report, status, error)
        groups.close()
    return summary


def _report_start(config: Config, components: RunComponents, trainer: Trainer, run_dir: Path, report: Reporter) -> None:
    entry = trainer.history.entries[0]
    report.write(
        "start",
        run_dir=str(run_dir),
        model=config.model.name,
        dataset=config.dataset.name,
        task=components.data.task,
        num_blocks=trainer.num_blocks,
        num_parameters=components.stack.num_parameters,
        world_size=dist.get_world_size(),
        batch_size=config.batch_size,
        epochs=config.epochs,
        steps_per_epoch=trainer.timeline.steps_per_epoch,
        num_steps=trainer.timeline.num_steps,
        plan=entry.as_dict(),
        reason=entry.reason,
        cache=components.storage.outlook(components.planner.profile, components.train),
    )


def _finish(
    config: Config, components: RunComponents, trainer: Trainer, run_dir: Path, report: Reporter, status: str,
    error: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Keeps the weights where all ranks can still talk, and writes the summary."""
    if status in ("completed", "diverged"):
        _save_model(config, components, trainer, run_dir)
    if dist.get_rank() != 0:
        return {}
    summary = {"status": status} | ({"error": error} if error else {}) | trainer.figures()
    write_json(run_dir / SUMMARY, summary)
    report.write("summary", **summary)
    return summary


def _save_model(config: Config, components: RunComponents, trainer: Trainer, run_dir: Path) -> None:
    state = trainer.runtime.weights()
    if state is not None:
        folder = run_dir / MODEL_FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config.model.save(components.stack, state, folder)

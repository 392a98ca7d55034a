"""One process of a run: signals, the process group, training, the summary and the saved model."""

import gc
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from pipetransformer.autocache.buffer import GIB
from pipetransformer.config.names import in_options
from pipetransformer.config.resuming import complete_summary
from pipetransformer.config.schema import Config
from pipetransformer.errors import Diverged, FreezeHurts, NotSaved, Stopped, UserError
from pipetransformer.report.card import write_card
from pipetransformer.report.event_log import EVENT_LOG, SUMMARY, read_events, write_json
from pipetransformer.report.reporter import ConsoleOptions, Reporter, open_report
from pipetransformer.report.run_folder import CONFIG, DRY_RUN, MODEL, share_files
from pipetransformer.report.wandb import NoLogger
from pipetransformer.runtime.groups import broadcast_from_rank0
from pipetransformer.runtime.host_memory import keep_freed_memory
from pipetransformer.training import interrupt
from pipetransformer.training.best_weights import weights_to_save
from pipetransformer.training.build import prepare
from pipetransformer.training.leaving import rank0_first
from pipetransformer.training.position import inside, naming_hangs
from pipetransformer.training.resume import wanted_checkpoint
from pipetransformer.training.start_event import report_start
from pipetransformer.training.trainer import Trainer
from pipetransformer.training.world import limit_threads, open_world

SECOND_PLACE = Path("/var/tmp")


def run_job(config: Config, run_dir: Path, plain: dict[str, Any], sweep: str | None = None) -> dict[str, Any]:
    """Runs one rank of a job; the environment says which.

    Returns:
        The summary on rank 0, its status on the others.
    """
    interrupt.listen()
    limit_threads()
    keep_freed_memory()
    with open_world(config.parallel) as device:
        return _run(config, run_dir, device, plain, sweep)


def _run(
    config: Config, run_dir: Path, device: torch.device, plain: dict[str, Any], sweep: str | None
) -> dict[str, Any]:
    run_dir = broadcast_from_rank0(run_dir)  # under torchrun each process has composed one of its own
    known = complete_summary(config, run_dir)
    if broadcast_from_rank0(bool(known)):  # under torchrun, where all ranks have to leave
        return known if dist.get_rank() == 0 else {"status": "completed"}
    try:
        if dist.get_rank() == 0:
            traces = () if config.resume.run else run_dir.glob("trace_*.json")  # of an earlier run in the same folder
            for stale in (run_dir / SUMMARY, *traces):
                stale.unlink(missing_ok=True)
        return run_rank(config, run_dir, device, plain, sweep)
    except BaseException as error:
        if dist.get_rank() == 0 and not (run_dir / SUMMARY).is_file():
            write_json(run_dir / SUMMARY, failed(error))
        raise
    finally:
        gc.unfreeze()


def failed(error: BaseException) -> dict[str, Any]:
    """Returns the summary of a run that ended before its first step."""
    if isinstance(error, KeyboardInterrupt):
        return {"status": "requeue" if interrupt.asks_to_requeue() else "interrupted"}
    return {"status": "failed", "error": f"{type(error).__name__}: {in_options(error)}"}


def run_rank(
    config: Config, run_dir: Path, device: torch.device, plain: dict[str, Any], sweep: str | None
) -> dict[str, Any]:
    """Runs one rank of a job in a world that is open.

    Returns:
        The summary on rank 0, its status on the others.
    """
    with rank0_first(), ExitStack() as closing, naming_hangs(config.parallel.timeout_s):
        report, checkpoint = Reporter(), wanted_checkpoint(config, run_dir)
        if dist.get_rank() == 0:
            logger = None if checkpoint is None else checkpoint.manifest.logger
            console = ConsoleOptions(config.log_every_s, config.log_every_steps, config.verbose)
            tracker = NoLogger() if config.dry_run else config.logger
            report = open_report(tracker, run_dir, plain, sweep, console, logger)
        closing.callback(report.close)
        with inside("reading data and measuring", 0):
            components = prepare(config, device, run_dir, closing, report, checkpoint)
        return _train(Trainer(config, components, report, run_dir), run_dir)


def _train(trainer: Trainer, run_dir: Path) -> dict[str, Any]:
    gc.freeze()  # what stands now stays, which the first plan does not; transitions collect the rest quickly
    trainer.start()
    status, error, together = "failed", None, True
    try:
        report_start(trainer, run_dir)
        if not trainer.config.dry_run:
            trainer.freeze_at_start()
            trainer.cache_again()
            for _ in trainer:
                pass
        status = DRY_RUN if trainer.config.dry_run else "completed"
    except Stopped as stop:
        status = "requeue" if stop.requeue else "interrupted"
    except KeyboardInterrupt:
        status, together = "interrupted", False
        raise
    except Diverged as diverged:
        status, error = "diverged", in_options(diverged)
        raise
    except FreezeHurts as hurts:
        status, error = "stopped", in_options(hurts)
        raise
    except BaseException as failure:
        together = False
        error = f"{type(failure).__name__}: {in_options(failure)}"
        raise
    finally:
        trainer.checkpoints.close(give_up=status == "failed")
        trainer.cache_session.release()
        summary = _finish(trainer, run_dir, status, error, together)
    return summary or {"status": status}


def _finish(trainer: Trainer, run_dir: Path, status: str, error: str | None, together: bool) -> dict[str, Any]:
    """Writes the summary and saves the weights.

    Args:
        together: All ranks ended at the same step, so that they can still gather the weights.
    """
    with trainer.runtime.averaged():
        state, step = weights_to_save(trainer) if together and status != DRY_RUN else (None, 0)
    if dist.get_rank() != 0:
        return {}
    summary = {"status": status} | ({"error": error} if error else {}) | trainer.summary()
    summary["cpu_seconds"] = trainer.spent.cpu_seconds  # of rank 0
    summary["report_seconds"] = trainer.report.seconds
    if estimate := trainer.estimate:
        summary["estimate"] = estimate
    if status == "interrupted" and (run_dir / SUMMARY).is_file():  # by the launcher, which knows why
        summary |= json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
    _write_summary(trainer, run_dir, summary)  # first, so that a model that finds no room costs the model alone
    if state is not None:
        _save_weights(trainer, run_dir, state, step, summary)
    trainer.report.write("summary", **summary)
    return summary


def _write_summary(trainer: Trainer, run_dir: Path, summary: dict[str, Any]) -> None:
    """Writes the summary. A folder that was removed is made again; one that cannot be written costs the file alone."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run_dir / SUMMARY, summary)
    except OSError as error:
        trainer.report.write("warning", message=f"{run_dir / SUMMARY} cannot be written ({error.strerror})")


def _save_weights(
    trainer: Trainer, run_dir: Path, state: dict[str, Tensor], step: int, summary: dict[str, Any]
) -> None:
    try:
        peft, model, stack = trainer.config.peft, trainer.config.model, trainer.components.stack
        folder = save_model(partial(peft.save, model, stack, state), state, places(run_dir))
    except NotSaved as error:
        summary["error"] = "; ".join(filter(None, (summary.get("error"), str(error))))
        _write_summary(trainer, run_dir, summary)
        if summary["status"] == "completed":  # otherwise what ended the run is told
            trainer.report.write("summary", **summary)
            raise
    else:
        summary["model"] = {"folder": str(folder), "step": step} | _own_scores(trainer, run_dir, step)
        _write_summary(trainer, run_dir, summary)
        if (run_dir / CONFIG).is_file():  # by the command
            _write_card(trainer, run_dir, folder, step)
        if folder.parent != run_dir:
            trainer.report.write("warning", message=f"the model is in {folder}: {run_dir} has no room for it")


def _own_scores(trainer: Trainer, run_dir: Path, step: int) -> dict[str, Any]:
    """Returns the metrics of saved weights that are not the last ones, which the summary's metrics are of."""
    if step == trainer.state.step:
        return {}
    try:
        evaluations = read_events(run_dir / EVENT_LOG, "evaluate")
    except (OSError, UserError) as error:
        trainer.report.write("warning", message=f"the summary lacks the metrics of the saved weights: {error}")
        return {}
    return {"metrics": {each["split"]: each["metrics"] for each in evaluations if each["step"] == step}}


def _write_card(trainer: Trainer, run_dir: Path, folder: Path, step: int) -> None:
    try:
        write_card(run_dir, folder, step)
    except (OSError, UserError) as error:
        trainer.report.write("warning", message=f"the saved model has no card: {error}")


def places(run_dir: Path) -> list[Path]:
    """Returns the folders in which the model may be saved, the run folder's first."""
    return [run_dir / MODEL, SECOND_PLACE / f"pipetransformer-{run_dir.name}-{os.getpid()}"]


def save_model(save: Callable[[Path], None], state: Mapping[str, Tensor], folders: Sequence[Path]) -> Path:
    """Saves a model to the first folder that takes it, replacing an older one there.

    Args:
        save: Writes it to a folder.
        state: All weights, by their original names.
        folders: In the order in which they are tried.

    Returns:
        The folder.

    Raises:
        NotSaved: No folder takes it.
    """
    reasons = []
    for folder in folders:
        try:
            folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            save(folder)
            share_files(folder)
        except (OSError, SafetensorError) as error:
            reasons.append(f"{folder} ({str(error).strip().partition(chr(10))[0]}; {_free_gib(folder):.3g} GiB free)")
            shutil.rmtree(folder, ignore_errors=True)
        else:
            return folder
    needed = sum(tensor.nbytes for tensor in state.values()) / GIB
    tried = " nor in ".join(reasons)
    raise NotSaved(f"the model takes {needed:.3g} GiB and could not be saved in {tried}; free space and run again")


def _free_gib(folder: Path) -> float:
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(nearest).free / GIB

"""One process of a run: signals, the process group, and a summary when nothing else was written."""

import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipetransformer.config.names import in_options
from pipetransformer.config.schema import Config
from pipetransformer.report.run_folder import SUMMARY, write_json
from pipetransformer.training import interrupt
from pipetransformer.training.run import run_rank
from pipetransformer.training.world import LocalRank, open_world


def run_job(config: Config, run_dir: Path, plain: dict[str, Any], sweep: str | None = None) -> dict[str, Any]:
    """Runs one rank of a job; the environment says which.

    Returns:
        The summary on rank 0, an empty one on the others.
    """
    interrupt.listen()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // LocalRank.here().local_world_size))
    with open_world(config.parallel) as device:
        return _run(config, run_dir, device, plain, sweep)


def _run(
    config: Config, run_dir: Path, device: torch.device, plain: dict[str, Any], sweep: str | None
) -> dict[str, Any]:
    run_dir = _agree(run_dir)
    try:
        if dist.get_rank() == 0:
            for stale in (run_dir / SUMMARY, *run_dir.glob("trace_*.json")):  # of an earlier run in the same folder
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
        return {"status": "interrupted"}
    return {"status": "failed", "error": f"{type(error).__name__}: {in_options(error)}"}


def _agree(run_dir: Path) -> Path:
    """Broadcasts rank 0's run folder: under torchrun each process has composed one of its own."""
    folders = [run_dir]
    dist.broadcast_object_list(folders)
    return folders[0]

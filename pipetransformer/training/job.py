"""What one process does around a run: signals, the world of processes, a summary when nothing else was written."""

import gc
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipetransformer.config.names import in_options
from pipetransformer.config.schema import Config
from pipetransformer.errors import UserError
from pipetransformer.report.run_folder import SUMMARY, write_json
from pipetransformer.training import interrupt as stop
from pipetransformer.training.node import LocalRank
from pipetransformer.training.run import run_rank


def run_job(config: Config, run_dir: Path, plain: dict[str, Any], sweep: str | None = None) -> dict[str, Any]:
    """Runs one rank of a job; the environment says which.

    Returns:
        The summary on rank 0, an empty one on the others.
    """
    stop.listen()
    device = _open_world(config)
    try:
        run_dir = _agree(run_dir)
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
        dist.destroy_process_group()


def failed(error: BaseException) -> dict[str, Any]:
    """The summary of a run that ended before its first step."""
    if isinstance(error, KeyboardInterrupt):
        return {"status": "interrupted"}
    return {"status": "failed", "error": f"{type(error).__name__}: {in_options(error)}"}


def _open_world(config: Config) -> torch.device:
    node = LocalRank.here()
    wants_cuda = config.parallel.device == "cuda" or (config.parallel.device == "auto" and torch.cuda.is_available())
    if wants_cuda and torch.cuda.device_count() < node.local_world_size:
        raise UserError(
            f"{node.local_world_size} processes share {torch.cuda.device_count()} GPUs, each needs one; lower "
            "parallel.world_size or give parallel.device=cpu"
        )
    device = torch.device("cuda", node.local_rank) if wants_cuda else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // node.local_world_size))
    timeout = timedelta(seconds=config.parallel.timeout_s)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    return device


def _agree(run_dir: Path) -> Path:
    """Rank 0's run folder: under torchrun each process has composed one of its own."""
    folders = [run_dir]
    dist.broadcast_object_list(folders)
    return folders[0]

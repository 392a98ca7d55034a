"""Starts one process per device and hands each the same plain configuration."""

import gc
import json
import logging
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipetransformer import forks
from pipetransformer.config.names import in_options
from pipetransformer.config.options import Config
from pipetransformer.errors import UserError
from pipetransformer.report.run_folder import SUMMARY, write_json


def launch(config: Config, run_dir: Path, plain: dict[str, Any], sweep: str | None) -> float | None:
    """Runs a job to its end: in this process under torchrun, else in fresh processes.

    Args:
        run_dir: The run folder, which exists.
        plain: The whole configuration as it was composed, for the record.
        sweep: Name of the sweep that the job belongs to.

    Returns:
        The main metric.

    Raises:
        UserError: An error that the user can fix, found by a worker.
        RuntimeError: Any other failure of a worker, with its trace.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if config.parallel.world_size not in (None, int(os.environ["WORLD_SIZE"])):
            raise UserError(
                f"parallel.world_size={config.parallel.world_size}, but torchrun started {os.environ['WORLD_SIZE']} "
                "processes; leave parallel.world_size out or make them equal"
            )
        return _metric(_run_job(config, run_dir, plain, sweep))
    return _metric(_launch_workers(config, run_dir, plain, sweep))


def _run_job(config: Config, run_dir: Path, plain: dict[str, Any], sweep: str | None) -> dict[str, Any] | None:
    """Runs one rank, and raises every error that the user can fix as a :class:`UserError` in terms of options."""
    forks.listen()
    from pipetransformer.training.job import run_job  # here, for the launcher needs none of it and starts sooner

    try:
        return run_job(config, run_dir, plain, sweep)
    except ValueError as error:
        raise UserError(in_options(error)) from error


def _launch_workers(config: Config, run_dir: Path, plain: dict[str, Any], sweep: str | None) -> dict[str, Any]:
    for noisy in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)  # the cause is reported below
    world_size = config.parallel.world_size or torch.cuda.device_count() or forks.DEFAULT_CPU_PROCESSES
    forks.share_cores(world_size)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=forks.start_method(config.parallel.device),
    )
    (run_dir / SUMMARY).unlink(missing_ok=True)  # an earlier run's, should the workers not come so far
    ending = {"status": "failed"}
    gc.disable()  # a collection in the thread of elastic's timer would have that thread wait for its own end
    try:
        return elastic_launch(settings, _run_job)(config, run_dir, plain, sweep)[0]  # of rank 0
    except ChildFailedError as error:
        cause = _cause(error)
        ending["error"] = str(cause)
        raise cause from None
    except (SignalException, KeyboardInterrupt) as error:
        ending["status"] = "interrupted"
        raise KeyboardInterrupt from error
    finally:
        _record(run_dir / SUMMARY, ending)
        gc.collect()
        gc.enable()


def _cause(error: ChildFailedError) -> Exception:
    """The first worker's own error: short where the user can mend it, with its trace otherwise."""
    _, failure = error.get_first_failure()
    message = failure.message
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    trace = message.get("extraInfo", {}).get("py_callstack", "") if isinstance(message, dict) else ""
    name, _, rest = text.partition(": ")
    if name == UserError.__name__:
        return UserError(rest)
    if failure.exitcode == -signal.SIGKILL:
        return UserError(
            f"worker {failure.local_rank} was killed, perhaps for want of memory; lower batch_size or "
            "parallel.world_size"
        )
    return RuntimeError(f"worker {failure.local_rank} failed: {text}\n{trace}")


def _record(file: Path, ending: dict[str, str]) -> None:
    """Says how a run ended where rank 0 could not: it was killed, or knows only that it was told to stop."""
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not told or ("error" in ending and told["status"] == "interrupted"):
        write_json(file, told | ending)


def _metric(summary: dict[str, Any] | None) -> float | None:
    """Rank 0 has a summary."""
    metric = (summary or {}).get("metric")
    return metric["value"] if metric else None

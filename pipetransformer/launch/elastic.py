"""Runs one process per device through torch's elastic launcher."""

import gc
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.config.names import in_options
from pipetransformer.config.schema import Config
from pipetransformer.errors import CacheLost, RankFailed, RankLost, Stopped, UserError
from pipetransformer.launch import failures, forkserver, rendezvous
from pipetransformer.launch.restarts import Restarts
from pipetransformer.launch.run_dir import tell_where_weights_are
from pipetransformer.parent_process import end_unheard
from pipetransformer.report.event_log import SUMMARY, write_json
from pipetransformer.report.reporter import print_line
from pipetransformer.training.interrupt import HANGUP, QUIT, SAME_S, SIGNALS, is_requested

NOISY = ("torch.distributed.elastic", "torch.multiprocessing", "torch.distributed.launcher")
STOPPED = ("interrupted", "requeue")
STOP_FILE = "stopped"  # tells ranks that begin after a signal
Summary = dict[str, Any]


def run_here(config: Config, run_dir: Path, plain: dict[str, Any], sweep: str | None) -> Summary:
    """Runs one rank in this process, which torchrun has started.

    Returns:
        The summary on rank 0, its status on the others.

    Raises:
        UserError: With options in place of fields.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if config.parallel.world_size not in (None, world_size):
        if config.parallel.arrangement == "single":
            raise UserError(
                f"parallel=single takes one process, but torchrun started {world_size}; start one, or take another "
                "parallel="
            )
        raise UserError(
            f"parallel.world_size={config.parallel.world_size}, but torchrun started {world_size} processes; leave "
            "parallel.world_size out or make them equal"
        )
    from pipetransformer.training.run import run_job  # here, for the launcher needs none of it and starts sooner

    try:
        return _unless_stopped(run_job(config, run_dir, plain, sweep), run_dir)
    except UserError as error:
        told = UserError(in_options(error))
        tell_where_weights_are(told, run_dir)
        raise told from error
    except BaseException as error:
        tell_where_weights_are(error, run_dir)
        raise


def run_workers(config: Config, run_dir: Path, plain: dict[str, Any], sweep: str | None) -> Summary:
    """Runs all ranks in processes of their own, and waits for their end.

    Returns:
        The summary of rank 0.

    Raises:
        UserError: An error that the user can fix, found by a rank.
        RuntimeError: Any other failure of a rank, with its trace.
        KeyboardInterrupt: The run was interrupted.
    """
    restarts = Restarts(config, run_dir, _num_ranks(config))
    while True:
        try:
            return _run_once(restarts.config, restarts.num_ranks, run_dir, plain, sweep)
        except (RankLost, RankFailed, CacheLost) as error:
            if not restarts.next_after(error):
                tell_where_weights_are(error, run_dir)
                raise
            print_line(restarts.announcement(error))
        except BaseException as error:
            tell_where_weights_are(error, run_dir)
            raise


def _run_once(config: Config, num_ranks: int, run_dir: Path, plain: dict[str, Any], sweep: str | None) -> Summary:
    """Starts the ranks and waits for their end."""
    forkserver.share_cores(num_ranks)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint=rendezvous.ADDRESS,
        max_restarts=0,
        monitor_interval=0.1,
        start_method=forkserver.start_method(config.parallel.device),
        signals_to_handle="SIGQUIT",  # the others go to the ranks, which save the run
    )
    (run_dir / SUMMARY).unlink(missing_ok=True)  # of an earlier run, in case the ranks fail before writing one
    ending = {"status": "failed"}
    folder = tempfile.TemporaryDirectory()
    with folder as name, _quiet(), _no_collector(), _main_not_imported(config), forwarded_signals(Path(name)) as came:
        try:
            summaries = elastic_launch(settings, _run_rank)(config, run_dir, plain, sweep, Path(name))
            return _unless_stopped(summaries[0], run_dir)
        except ChildFailedError as error:
            failures.wait_for_ranks(Path(name), config.parallel.timeout_s)
            if came:  # before the first step
                stop = _stopped(came[0] != QUIT, run_dir)
                ending["status"] = "requeue" if stop.requeue else "interrupted"
                raise stop from error
            exit_codes = {failed.local_rank: failed.exitcode for failed in error.failures.values()}
            cause, ending["error"] = failures.cause(Path(name), num_ranks, exit_codes)
            raise cause from None
        except Stopped:
            ending = {}
            raise
        except (SignalException, KeyboardInterrupt) as error:
            ending["status"] = "interrupted"
            raise KeyboardInterrupt from error
        finally:
            if ending:
                _record(run_dir / SUMMARY, ending)


def _unless_stopped(summary: Summary, run_dir: Path) -> Summary:
    """Returns the summary of a run that came to its end."""
    if summary.get("status") in STOPPED:
        raise _stopped(summary["status"] == "requeue", run_dir)
    return summary


def _stopped(requeue: bool, run_dir: Path) -> Stopped:
    return Stopped(requeue, None if CheckpointFolder(run_dir / FOLDER).newest_step is None else run_dir)


@contextmanager
def forwarded_signals(folder: Path) -> Iterator[list[int]]:
    """Hands signals on to the ranks, which save the run and end by themselves; torch's launcher would stop them.

    Args:
        folder: In which ranks that begin later find that a signal came, as while the fork server still imports.

    Yields:
        The signals that came.
    """
    came: list[int] = []
    first_s = math.inf

    def forward(number: int, _: object) -> None:
        nonlocal first_s
        came.append(number)
        first_s = min(first_s, time.monotonic())
        with suppress(OSError):
            (folder / STOP_FILE).touch()  # first, so that a rank that begins meanwhile finds it
        for child in multiprocessing.active_children():
            if child.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM if number == HANGUP else number)
        if time.monotonic() - first_s > SAME_S:
            raise KeyboardInterrupt  # a second one, whatever the ranks are busy with

    outlives_terminal = signal.getsignal(HANGUP) == signal.SIG_IGN  # as by nohup
    handled = SIGNALS if outlives_terminal else (*SIGNALS, HANGUP)
    before = {each: signal.signal(each, forward) for each in handled}
    try:
        yield came
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _num_ranks(config: Config) -> int:
    """Returns the number of processes; refuses more than there are GPUs, unless they run on the CPU."""
    device, num_gpus = config.parallel.device, torch.cuda.device_count()
    num_ranks = config.parallel.world_size or num_gpus or config.parallel.cpu_processes
    wants_gpus = device == "cuda" or (device == "auto" and num_gpus > 0)
    if wants_gpus and num_ranks > num_gpus:
        raise UserError(
            f"parallel.world_size={num_ranks} processes need a GPU each, and there are {num_gpus}; lower "
            "parallel.world_size or give parallel.device=cpu"
        )
    return num_ranks


def _run_rank(config: Config, run_dir: Path, plain: dict[str, Any], sweep: str | None, folder: Path) -> Summary:
    """Runs one rank in a process that torch's launcher has started; records why it fails."""
    parent = os.getppid()
    forkserver.restore_signals()
    forkserver.collect_again()
    end_unheard(parent, is_requested)
    from pipetransformer.training.run import run_job

    try:
        if (folder / STOP_FILE).exists():
            raise KeyboardInterrupt
        with failures.alive(folder):
            summary = run_job(config, run_dir, plain, sweep)
        forkserver.restore_signals()  # torch's launcher has the rank wait for the others
    except BaseException as error:
        if os.getppid() != parent:
            os._exit(1)  # the launcher has ended, with the folder for records
        failures.record(folder, int(os.environ["RANK"]), error)
        raise
    if os.getppid() != parent:
        os._exit(1)
    return summary


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's launcher: :mod:`failures` reports the cause. Its loggers have levels of their own."""
    found = [logging.getLogger(name) for name in (*NOISY, *logging.root.manager.loggerDict) if name.startswith(NOISY)]
    levels = [(logger, logger.level) for logger in found]
    for logger in found:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Turns the garbage collector off: on the thread of elastic's timer it would join that thread and deadlock."""
    gc.disable()
    gc.freeze()  # the libraries, so that the collection at the end takes no time
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()


@contextmanager
def _main_not_imported(config: Config) -> Iterator[None]:
    """Keeps new processes from importing the user's script, which then needs no ``__main__`` guard.

    Where the script defines a spec of the configuration, they have to import it.
    """
    main = sys.modules["__main__"]
    specs = (config.model, config.dataset, config.freeze, config.optim, config.logger)
    if any(type(spec).__module__ == "__main__" for spec in specs):
        yield
        return
    hidden = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


def _record(file: Path, ending: dict[str, str]) -> None:
    """Writes how a run ended where rank 0 could not: it was killed, or knows only that another rank had ended."""
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not told or ("error" in ending and told["status"] in ("interrupted", "failed")):
        write_json(file, told | ending)

"""Runs a configuration to its end. Imports torch as late as it can, so that refusals come at once."""

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from pipetransformer.config.kinds import RUN, check_plain
from pipetransformer.config.schema import Config, as_plain, write_config
from pipetransformer.config.validate import check_batch, validate
from pipetransformer.cores import num_cores
from pipetransformer.data.base import count_before_loading
from pipetransformer.errors import UserError
from pipetransformer.kinds import check_kinds
from pipetransformer.launch import forkserver
from pipetransformer.launch.claim import claimed
from pipetransformer.launch.restarts import after_restart
from pipetransformer.launch.run_dir import (
    began_with_torchrun,
    finished_summary,
    record_of_refused,
    refuse_fewer_epochs,
    refuse_other_run,
    tell_of_new_start,
)
from pipetransformer.parent_process import start_time
from pipetransformer.report.reporter import print_phase

RANKS_PER_CORE = 16  # more only wait for each other
MEMORY_PER_RANK = 128 * 2**20  # bytes of a forked rank that it shares with no other, and of a very small model
FEWEST_DESCRIPTORS = 64  # of a run of one rank
DESCRIPTORS_PER_RANK = 8  # of the launcher: queue, pipes and log files of each rank
DESCRIPTORS_SENT_PER_RANK, MOST_DESCRIPTORS_SENT = 2, 250  # to each forked process, in one message
_numbers = count(1)  # of the runs of this process whose folder has no name


def train(config: Config, run_dir: str | Path | None = None) -> dict[str, Any]:
    """Trains as the command line does: one process per device, or in this one under torchrun.

    A script that calls it needs no ``__main__`` guard, unless it defines a spec of the configuration itself.

    Args:
        config: The run, for example ``Config(model=TimmModel(name="vit_tiny_patch16_224"), dataset=Digits(), ...)``.
        run_dir: Folder for events, summary and model; by default that of ``resume.run``, else
            ``outputs/<date>/<time>``; under torchrun of its start, with ``-2`` for the second run of a script.

    Returns:
        The contents of ``summary.json``; under torchrun its ``status`` alone on all ranks but 0.

    Raises:
        UserError: A value that the user can change, in the names of the command line's options, which are those of the
            configuration's attributes.
        RuntimeError: Any other failure of a rank, with its trace.
        KeyboardInterrupt: The run was interrupted.
    """
    check_kinds({"config": config, "run_dir": run_dir}, RUN)
    validate(config)
    check_plain(config)
    if not under_torchrun():  # whose processes train themselves
        _check_importable(config)
    preflight(config)
    resumed = None if config.resume.run == "auto" else config.resume.run
    folder = Path(run_dir or resumed or _default_folder()).resolve()

    def write_record() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder)

    return run_in_folder(config, folder, write_record, option="run_dir")


def _check_importable(config: Config) -> None:
    """Refuses a specification whose class the processes of the run would look for in vain.

    Raises:
        UserError: It was typed, as in a notebook, or is defined inside a function.
    """
    main = Path(getattr(sys.modules["__main__"], "__file__", None) or "").is_file()
    for name, spec in vars(config).items():
        kind = type(spec)
        is_typed, is_local = kind.__module__ == "__main__" and not main, "<locals>" in kind.__qualname__
        if is_typed or is_local:
            where = "inside a function" if is_local else "in a notebook or on a prompt"
            raise UserError(
                f"{name} is of {kind.__qualname__}, a class that is defined {where}, where the processes of the run "
                "cannot import it; put it into a module, or give it to pt.ElasticTrainer(...), which trains here"
            )


def _default_folder() -> str:
    """Returns the folder of a run without one; the n-th of a script finds its own where torchrun starts it again."""
    name, number = f"outputs/{start_time():%Y-%m-%d/%H-%M-%S}", next(_numbers) if under_torchrun() else 1
    return name if number == 1 else f"{name}-{number}"


def run_in_folder(
    config: Config, run_dir: Path, write_record: Callable[[], None], sweep: str | None = None, option: str = ""
) -> dict[str, Any]:
    """Runs a job in a folder that holds no other run, or the one that goes on; see :func:`start`.

    Args:
        write_record: Writes the settings of the run there; the first rank calls it.
        option: By which the folder was given; empty: by that of the command.
    """
    asked, config = config, after_restart(config)
    if not is_first_rank():
        return start(config, run_dir, as_plain(config), sweep)
    option = option or f"hydra.{'run' if sweep is None else 'sweep'}.dir"
    with claimed(run_dir, option):
        return _run_claimed(asked, config, run_dir, write_record, sweep, option)


def _run_claimed(
    asked: Config, config: Config, run_dir: Path, write_record: Callable[[], None], sweep: str | None, option: str
) -> dict[str, Any]:
    """Runs a job in a folder where no other run goes on.

    Args:
        asked: The configuration as it is at the first start; after a restart by torchrun the run goes on.
    """
    tell_of_new_start(run_dir)
    refuse_other_run(config if began_with_torchrun(run_dir) else asked, run_dir, option)
    refuse_fewer_epochs(config, run_dir)
    plain = as_plain(config)
    if finished := finished_summary(config, run_dir):
        return start(config, run_dir, plain, sweep) if under_torchrun() else finished  # there all ranks are told
    with record_of_refused(config, run_dir):
        write_record()
        return start(config, run_dir, plain, sweep)


def under_torchrun() -> bool:
    """Returns whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first_rank() -> bool:
    """Returns whether this process looks after the run folder: the launcher, or torchrun's first rank."""
    return os.environ.get("RANK", "0") == "0"


def start(config: Config, run_dir: Path, plain: dict[str, Any], sweep: str | None = None) -> dict[str, Any]:
    """Runs a job: in this process under torchrun, else in one process per device.

    Args:
        run_dir: The run folder, which exists.
        plain: The whole configuration as plain values, for the record.
        sweep: Name of the sweep that the job belongs to.

    Returns:
        The summary of the run; under torchrun its status alone on all ranks but 0.

    Raises:
        UserError: An error that the user can fix.
        RuntimeError: Any other failure of a rank, with its trace.
    """
    libraries = (*config.model.libraries, *config.dataset.libraries, *config.peft.libraries)
    if under_torchrun():
        with _without_collector():
            from pipetransformer.launch.elastic import run_here

            _preload(("pipetransformer.training.run", *libraries))
        return run_here(config, run_dir, plain, sweep)
    forkserver.use_one_temporary_folder()
    num_ranks = config.parallel.world_size or config.parallel.cpu_processes
    forkserver.preload(config.parallel.device, num_ranks, libraries)
    _announce(config)
    with _without_collector():
        from pipetransformer.launch.elastic import run_workers  # torch is imported from here on
    return run_workers(config, run_dir, plain, sweep)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Turns the garbage collector off while libraries are imported: it takes a fifth of the time and finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _preload(modules: Iterable[str]) -> None:
    """Imports modules that are needed later; whoever needs one that is not there says so."""
    for name in modules:
        with suppress(ImportError):
            import_module(name)


def preflight(config: Config) -> None:
    """Refuses what this machine, the data or the hub do not allow, before a run folder or a process is there.

    Raises:
        UserError: Too many processes, or data or a model that are nowhere or do not fit.
    """
    if not under_torchrun():
        check_world_size(config.parallel.world_size)
        check_data(config)
        config.model.check_exists()


def check_data(config: Config) -> None:
    """Looks at the dataset once, and refuses a batch that is larger than it.

    Raises:
        UserError: The data is nowhere, cannot be read, or is too small.
    """
    num_samples = count_before_loading(config.dataset)
    if num_samples is not None:
        check_batch(config.batch_size, num_samples)


def _announce(config: Config) -> None:
    """Prints the run's first line, seconds before a rank can."""
    num_ranks, forked = config.parallel.world_size, forkserver.start_method(config.parallel.device) == "forkserver"
    if num_ranks is None and forked:
        num_ranks = config.parallel.cpu_processes
    count = "a process per GPU" if num_ranks is None else "1 process" if num_ranks == 1 else f"{num_ranks} processes"
    print_phase(f"starting {count}")


def check_world_size(world_size: int | None) -> None:
    """Refuses more processes than this machine can start.

    Raises:
        UserError: Cores, memory or file descriptors would not do.
    """
    cores, descriptors = num_cores(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if descriptors < FEWEST_DESCRIPTORS:
        raise UserError(
            f"this process may have {descriptors} files open, and a run takes {FEWEST_DESCRIPTORS} at least; raise the "
            "limit by ulimit -n 1024"
        )
    limit = min(
        RANKS_PER_CORE * cores,
        memory // MEMORY_PER_RANK,
        descriptors // DESCRIPTORS_PER_RANK,
        MOST_DESCRIPTORS_SENT // DESCRIPTORS_SENT_PER_RANK,
    )
    if world_size is not None and world_size > limit:
        raise UserError(
            f"parallel.world_size={world_size} is more than the {limit} processes that this machine can start "
            f"({cores} cores, {memory / 2**30:.3g} GiB of memory, {descriptors} open files); lower "
            "parallel.world_size, or use several machines by torchrun"
        )

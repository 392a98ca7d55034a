"""The command ``pipetransformer-train`` (or ``python train.py``), for example with ``model=bert dataset=squad``."""

import atexit
import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pipetransformer.config.arguments import explain, read_arguments, unwritable
from pipetransformer.config.compose import load, register
from pipetransformer.config.help import print_help
from pipetransformer.config.schema import CONF, Config, write_config
from pipetransformer.errors import Stopped, UserError
from pipetransformer.launch.run_dir import record_refused_job, resumed_arguments
from pipetransformer.launch.start import is_first_rank, preflight, run_in_folder, under_torchrun
from pipetransformer.report.environment import write_overrides
from pipetransformer.report.reporter import erase_phase
from pipetransformer.report.run_folder import short_path
from pipetransformer.report.secrets import redact
from pipetransformer.training import interrupt

NO_RUN_FOLDER = ("hydra.run.dir=.",)
NOT_SAVED = "the run has no checkpoint; the same command with resume=auto starts it anew"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def compose_and_run(node: DictConfig) -> float | None:
    """Runs one job. Hydra calls it once, or for a sweep once per job.

    Returns:
        The main metric, which sweepers optimize.
    """
    hydra_config = HydraConfig.get()
    sweep = Path(hydra_config.sweep.dir).name if hydra_config.mode == RunMode.MULTIRUN else None
    try:
        return _run_job(node, Path(hydra_config.runtime.output_dir).resolve(), sweep)
    except UserError as error:
        if sweep is None:
            _end(error)
        job = f"job {hydra_config.job.num} ({' '.join(hydra_config.overrides.task)})"
        print(redact("\n".join([f"{job} failed: {explain(error)}", *notes(error)])), file=sys.stderr)
        raise  # the other jobs go on, and Hydra ends with this error


def _run_job(node: DictConfig, run_dir: Path, sweep: str | None) -> float | None:
    try:
        config = load(node)
        preflight(config)
    except UserError as error:
        if sweep is None:
            _remove_empty(run_dir)
        else:
            settings = cast("dict[str, Any]", OmegaConf.to_container(node))
            record_refused_job(error, run_dir, settings, _arguments())
        raise
    metric = run_in_folder(config, run_dir, partial(_write_record, config, run_dir), sweep).get("metric")
    return metric["value"] if metric else None


def _write_record(config: Config, run_dir: Path) -> None:
    try:
        write_config(config, run_dir)
        write_overrides(run_dir, _arguments())
    except OSError as error:
        raise UserError(unwritable(error)) from None


def _arguments() -> list[str]:
    """Returns the arguments of a job, which a resumed run is composed of."""
    return [*HydraConfig.get().overrides.task, *_own_folders()]


def _own_folders() -> list[str]:
    """Returns the option that gives a resumed run the folders with YAML of the user's own, as ``--config-dir`` does."""
    sources = HydraConfig.get().runtime.config_sources
    paths = [each.path.removeprefix("file://") for each in sources if "command-line" in each.provider]
    folders = dict.fromkeys(f'"file://{Path(path).resolve()}"' for path in paths if "://" not in path)
    return [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []


def _remove_empty(folder: Path) -> None:
    """Removes a run folder that Hydra has made, and below the working directory the empty folders of its date."""
    here = Path.cwd()
    for each in (folder, *folder.parents[:2]):
        is_ours = here in each.parents or (each == folder != here)
        if not is_ours or any(each.iterdir()):
            return
        with suppress(OSError):  # another file system begins there
            each.rmdir()


def _leave_garbage() -> None:
    """Saves a second: at its end Python searches all that was imported for garbage, which goes with the process.

    A rank searches, and so does a launcher that has imported a model of the user's: triton, which comes with torch,
    complains of what was not collected.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def main() -> None:
    """Runs the command line. An error that the user can fix ends in one line, without a trace."""
    atexit.register(_leave_garbage)
    if {"-h", "--help"} & {*sys.argv}:
        return print_help(sys.argv[1:])
    if under_torchrun():
        _refuse_sweep()
        sys.argv += NO_RUN_FOLDER if not is_first_rank() else ()
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors of composition come here in place of being printed
    try:
        sys.argv[1:] = resumed_arguments(read_arguments(sys.argv[1:]), under_torchrun())
        _refuse_secrets(sys.argv[1:])
        run = _recorded(compose_and_run) if under_torchrun() else compose_and_run
        with _table_at_the_end():
            run()
    except (UserError, CompactHydraException) as error:
        _end(error)
    except OSError as error:  # Hydra makes the folder
        sys.exit(unwritable(error))
    except Stopped as stop:
        if is_first_rank():
            print(*notes(stop), _way_on(stop.saved_in, SweepFolder.folder), sep="\n", file=sys.stderr)
        sys.exit(stop.exit_code)
    except KeyboardInterrupt as error:  # before the first step, or a second time
        print(*notes(error), sep="\n", end="\n" * bool(notes(error)), file=sys.stderr)
        sys.exit(Stopped(interrupt.asks_to_requeue()).exit_code)


def _way_on(saved_in: Path | None, sweep: Path | None) -> str:
    """Returns the last word of a run that was stopped: the same command might make a folder of its own."""
    if sweep is not None:
        folder = shlex.quote(f"hydra.sweep.dir={short_path(sweep)}")
        return f"the same command with resume=auto {folder} goes on with each job that is not complete"
    if saved_in is None:
        return NOT_SAVED
    return f"the run is saved; {shlex.quote(f'resume={short_path(saved_in)}')} goes on with it"


class SweepFolder(Callback):
    """Remembers the folder of a sweep, whichever launcher runs its jobs. Hydra calls it."""

    folder: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        SweepFolder.folder = Path(config.hydra.sweep.dir).resolve()


@contextmanager
def _table_at_the_end() -> Iterator[None]:
    """Prints the table of a sweep when its last job has ended, whether it failed or not."""
    try:
        yield
    finally:
        if SweepFolder.folder is not None:
            from pipetransformer.report.sweep import print_sweep

            print_sweep(SweepFolder.folder)


def _end(error: Exception) -> NoReturn:
    """Ends with one line that explains the error; under torchrun rank 0 prints it, and torchrun's summary shows it."""
    if under_torchrun():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(UserError(redact(explain(error))))
    if sys.stderr.isatty():
        erase_phase(sys.stderr)
    sys.exit(redact("\n".join([explain(error), *notes(error)])) if is_first_rank() else 1)


def notes(error: BaseException) -> list[str]:
    """Returns the lines that were added to an error on its way: where the weights of the run are."""
    return getattr(error, "__notes__", [])


def _recorded(run: Callable[[], object]) -> Callable[[], object]:
    """Returns the function so that torchrun's summary of a failure shows its error."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(run)


def _refuse_secrets(arguments: Sequence[str]) -> None:
    """Refuses keys and tokens among arguments that Hydra itself writes to disk, unredacted."""
    is_written = {"-m", "--multirun"} & {*arguments} or any("hydra.output_subdir=" in each for each in arguments)
    found = [redact(each) for each in arguments if redact(each) != each]
    if is_written and found:
        raise UserError(
            f"{found[0]} holds a key or token, and Hydra writes all arguments of a sweep or below hydra.output_subdir "
            "to disk; set it in the environment instead, as WANDB_API_KEY or HF_TOKEN"
        )


def _refuse_sweep() -> None:
    if {"-m", "--multirun"} & set(sys.argv[1:]):
        command = " ".join(["python", *sys.argv])
        sys.exit(
            "A sweep cannot run under torchrun: every process would make a sweep folder of its own.\n"
            f"Run it without torchrun, each job starts its own processes:  {command} parallel.world_size=..."
        )

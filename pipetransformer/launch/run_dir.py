"""The run folder before a run starts: whether it holds another run, and the arguments of the one to be resumed."""

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder, open_checkpoints
from pipetransformer.checkpoint.manifest import Manifest
from pipetransformer.config.arguments import quoted, unquoted, with_own_fields
from pipetransformer.config.names import in_options
from pipetransformer.config.resuming import changes, check_epochs, complete_summary, dotted
from pipetransformer.config.schema import Config, as_plain, write_settings
from pipetransformer.errors import RankLost, UserError
from pipetransformer.launch.forkserver import remove_stale
from pipetransformer.launch.restarts import is_restarted
from pipetransformer.parent_process import torchrun_start
from pipetransformer.report.environment import OVERRIDES, by_option, option_of, read_overrides, write_overrides
from pipetransformer.report.event_log import EVENT_LOG, SUMMARY, known_summary, write_json
from pipetransformer.report.reporter import print_line
from pipetransformer.report.run_folder import CONFIG, DRY_RUN, MODEL, TENSORBOARD, WANDB, short_path
from pipetransformer.report.secrets import redact
from pipetransformer.report.trace import remove_traces

RUN_DIR, RESUME, WORLD_SIZE = "hydra.run.dir", "resume.run", "parallel.world_size"
CLOCKS_S = 10.0  # by which those of nodes and disks may differ
OF_ONE_START = (RUN_DIR, RESUME, "resume.allow", "overwrite")  # what they permit holds for one command
OWN_FILES = (CONFIG, EVENT_LOG, SUMMARY, MODEL, FOLDER)
DEFAULT_FOLDER = re.compile(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")


def resumed_arguments(arguments: Sequence[str], by_torchrun: bool = False) -> list[str]:
    """Returns the arguments of a run that is resumed by its folder: its own, and those that are given in addition.

    Args:
        arguments: Of the command line.
        by_torchrun: It has started the ranks, so that the run's own number of them does not count.

    Raises:
        UserError: The folder holds no run that the command line started.
    """
    given = by_option(arguments)
    folder = unquoted(given.get(RESUME, "").partition("=")[2])
    if folder in ("", "auto", "null"):
        return list(arguments)
    if not (Path(folder) / CONFIG).is_file():
        raise UserError(f"resume={folder} is no run folder: it has no {CONFIG}; give the folder of one run")
    own = read_overrides(Path(folder))
    if own is None:
        raise UserError(f"resume={folder} was started from Python; resume it there, by Resume(run=...)")
    dropped = {*given, *OF_ONE_START} | ({WORLD_SIZE} if by_torchrun else set())
    kept = [one for one in own if option_of(one) not in dropped]
    num_flags = next((n for n, each in enumerate(arguments) if "=" in each and not each.startswith("-")), 0)
    more = with_own_fields([one for one in arguments[num_flags:] if option_of(one) != RESUME], kept)
    return [*arguments[:num_flags], *kept, *more, f"{RESUME}={quoted(folder)}", f"{RUN_DIR}={quoted(folder)}"]


def finished_summary(config: Config, run_dir: Path) -> dict[str, Any] | None:
    """Returns the summary of a run that is to be resumed and has already come to its end; ``None`` for any other.

    Raises:
        UserError: It has come to its end with options under which it ended otherwise.
    """
    summary = complete_summary(config, run_dir)
    if not summary:
        return None
    if changed := _changes(config, run_dir):
        raise UserError(
            f"the run in {run_dir} is complete, with other settings ({'; '.join(changed)}); drop them, or "
            f"{_way_on(config, run_dir, [change.partition(':')[0] for change in changed])}"
        )
    remove_stale()  # of the launcher, which may have been killed after its last word
    print_line(f"nothing to resume: the run in {run_dir} is complete")
    return summary


def _way_on(config: Config, run_dir: Path, names: Sequence[str]) -> str:
    """Returns what to do for a run with other values of the named options than those of the complete one."""
    manifest = _newest_manifest(run_dir)
    if manifest is None or "seed" in names or not manifest.fits(manifest.data["num_samples"], config.batch_size):
        return "start another run"
    may_differ = any(name.startswith("dataset.") for name in names)  # only when they are loaded they are counted
    where = " where an epoch has as many steps as before" if may_differ else ""
    return f"give resume.allow=[{','.join(names)}] to go on with the new ones{where}"


def _newest_manifest(run_dir: Path) -> Manifest | None:
    """Returns the newest manifest of a run that can be read."""
    return next((found for _, found in open_checkpoints(run_dir / FOLDER) if isinstance(found, Manifest)), None)


def _changes(config: Config, run_dir: Path) -> list[str]:
    """Returns which options of a run differ, of those that its release had; none where its record is lost."""
    try:
        found = yaml.safe_load((run_dir / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        found = None
    old, new = dotted(found if isinstance(found, dict) else {}), dotted(redact(as_plain(config)))
    both = old.keys() & new.keys()
    return changes({name: old[name] for name in both}, {name: new[name] for name in both})


def tell_of_new_start(run_dir: Path) -> None:
    """Tells that a run begins anew where torchrun has started it again and the default folder does not hold it."""
    is_default = DEFAULT_FOLDER.fullmatch("/".join(run_dir.parts[-3:]))
    if is_default and is_restarted() and not _own_files(run_dir):
        print_line(
            f"torchrun has started the ranks again, and the run begins anew: {run_dir} does not hold it; give "
            "hydra.run.dir=, or in a script run_dir=, to go on after a restart"
        )


def refuse_fewer_epochs(config: Config, run_dir: Path) -> None:
    """Refuses to resume a run whose last checkpoint lies beyond the end of its epochs, before anything is started.

    Raises:
        UserError: See :func:`~pipetransformer.config.resuming.check_epochs`.
    """
    if config.resume.run is None:
        return
    manifest = _newest_manifest(run_dir)
    if manifest is not None:
        check_epochs(config.epochs, manifest.train, run_dir)


def began_with_torchrun(run_dir: Path) -> bool:
    """Returns whether a folder's run began since torchrun did, or nobody can tell: a restart then goes on with it."""
    began = torchrun_start()
    if began is None:
        return True
    try:
        return (run_dir / CONFIG).stat().st_mtime > began.timestamp() - CLOCKS_S
    except OSError:
        return False


def refuse_other_run(config: Config, run_dir: Path, option: str = RUN_DIR) -> None:
    """Keeps the run that a folder holds; removes one without a step, and with ``overwrite`` any other.

    Args:
        option: By which another folder is given.

    Raises:
        UserError: There is one, and it is neither resumed nor to be overwritten.
    """
    found = _own_files(run_dir)
    if config.resume.run is not None or not found:
        return
    if not config.overwrite and not _is_replaceable(run_dir):
        raise UserError(
            f"{run_dir} holds a run already ({_status(run_dir)}); give resume=auto to go on with it, overwrite=true to "
            f"replace it, or another {option}="
        )
    for name in (*found, WANDB, TENSORBOARD):  # whose commands the new run would end with
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    remove_traces(run_dir)


def _own_files(run_dir: Path) -> list[str]:
    """Returns the files and folders of a run that are there; none where the folder holds no run."""
    return [name for name in OWN_FILES if (run_dir / name).exists()]


def _status(run_dir: Path) -> str:
    return known_summary(run_dir).get("status", "not finished")


def _is_replaceable(run_dir: Path) -> bool:
    """Returns whether the run there was only estimated, or refused or stopped before its first step."""
    status, is_empty = _status(run_dir), not (_has_steps(run_dir) or (run_dir / FOLDER).exists())
    return status == DRY_RUN or (status in ("failed", "interrupted", "requeue") and is_empty)


@contextmanager
def record_of_refused(config: Config, run_dir: Path) -> Iterator[None]:
    """Gives a run its settings and summary back where it was to be resumed and is refused before its first step.

    One that was to start has a summary that says so: without it the folder would count as that of a run that goes on.
    """
    names = (CONFIG, OVERRIDES, SUMMARY) if config.resume.run is not None else ()
    before = {name: (run_dir / name).read_bytes() for name in names if (run_dir / name).is_file()}
    try:
        yield
    except UserError as error:
        path = run_dir / SUMMARY  # a rank that starts removes the earlier one
        is_earlier = path.is_file() and path.read_bytes() == before.get(SUMMARY)
        if _is_refused(error, {} if is_earlier else known_summary(run_dir)):
            for name, content in before.items():
                (run_dir / name).write_bytes(content)
            if not before and not (run_dir / SUMMARY).is_file():
                write_refused(error, run_dir)
        raise


def write_refused(error: UserError, run_dir: Path) -> None:
    """Writes the summary of a run that was refused before its ranks started."""
    with suppress(OSError):  # what the user has to know is the refusal
        write_json(run_dir / SUMMARY, {"status": "failed", "error": in_options(error)})


def record_refused_job(error: UserError, run_dir: Path, settings: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Gives a sweep's job that was refused a record, by which tables of its sweep have it; another run keeps its own.

    Args:
        settings: Those of the job as they were composed, which may be what is wrong.
        arguments: Of its command line.
    """
    if _own_files(run_dir) and not _is_replaceable(run_dir):
        return
    with suppress(OSError):
        write_settings(settings, run_dir)
        write_overrides(run_dir, arguments)
    write_refused(error, run_dir)


def tell_where_weights_are(error: BaseException, run_dir: Path) -> None:
    """Adds a note to the error that ended a run without a saved model: how to get the weights of its last checkpoint.

    A run that was refused before its first step gets none.
    """
    summary = known_summary(run_dir)
    if "model" in summary or _is_refused(error, summary) or not _has_steps(run_dir):
        return
    step, run = CheckpointFolder(run_dir / FOLDER).newest_step, short_path(run_dir)
    if step is None:
        error.add_note("the run had no checkpoint yet, and its weights are lost")
        return
    command = shlex.join(["pipetransformer-export", f"run={run}", f"out={run / f'model-{step}'}"])
    error.add_note(f"the weights of step {step:,} are in its last checkpoint; this saves them as a model:  {command}")


def _is_refused(error: BaseException, summary: Mapping[str, Any]) -> bool:
    """Returns whether an error came from what the user can mend, before the first step."""
    return isinstance(error, UserError) and not isinstance(error, RankLost) and not summary.get("optimizer_steps")


def _has_steps(run_dir: Path) -> bool:
    """Returns whether the run made a step, in this start of its ranks or in an earlier one."""
    log = run_dir / EVENT_LOG
    if not log.is_file():
        return False
    with log.open("rb") as lines:
        return any(b'"event": "step"' in line for line in lines)

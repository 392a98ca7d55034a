"""Decides whether a run goes on, and which options may differ: those under which it would end otherwise may not."""

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.config.schema import Config
from pipetransformer.errors import UserError
from pipetransformer.report.event_log import known_summary

NEUTRAL = (
    "parallel", "cache", "loader", "checkpoint", "evaluate", "resume", "launch", "logger", "log_every_s",
    "log_every_steps", "verbose", "trace", "overwrite", "targets", "dry_run", "baseline", "profile", "compile",
)  # fmt: skip
"""Options and sections that do not change a result: topology, bookkeeping, and where things are kept."""
COUNTED = (
    "cache.storage", "cache.augmentation", "cache.variants", "evaluate.metric", "evaluate.patience",
    "evaluate.min_delta",
)  # fmt: skip
"""Options of those sections that do: features are stored in another precision or drawn less often; a run ends early."""
JUDGED = ("evaluate.every_epochs", "evaluate.every_steps")
"""Options that do where evaluations decide when a run ends, or whether a freeze stays."""
MOVABLE = ("dataset.path", "dataset.root")
"""Places of data whose digest is compared."""
FURTHER = ("dataset", "randomness.topology")
"""Names that may be allowed and are no options: the digest of the data, and what the device's random numbers follow."""

Settings = Mapping[str, Any]
"""Plain values by the dotted names of their options."""
_MISSING = object()


def complete_summary(config: Config, run_dir: Path) -> dict[str, Any]:
    """Returns the summary of a run that is to be resumed and has nothing left to do; empty for any other.

    A complete run goes on from its last checkpoint where its model was not saved, as after a signal meanwhile, or where
    ``resume.allow`` lets options differ.
    """
    summary = {} if config.resume.run is None else known_summary(run_dir)
    may_go_on = bool(config.resume.allow) or "model" not in summary
    goes_on = may_go_on and CheckpointFolder(run_dir / FOLDER).newest_step is not None
    return summary if summary.get("status") == "completed" and not goes_on else {}


def counts(option: str) -> bool:
    """Returns whether another value of an option changes the result of a run."""
    return option in COUNTED or not (option in MOVABLE or option.partition(".")[0] in NEUTRAL)


def changes(old: Settings, new: Settings, allowed: Sequence[str] = ()) -> list[str]:
    """Returns each option that changes the result, with its old and its new value: ``"optim.lr: 0.1 -> 0.2"``."""
    judged = JUDGED if _is_judged(old) or _is_judged(new) else ()
    return [
        f"{name}: {_show(old, name)} -> {_show(new, name)}"
        for name in sorted((old.keys() | new.keys()) - {*allowed})
        if (counts(name) or name in judged) and old.get(name, _MISSING) != new.get(name, _MISSING)
    ]


def check_allowed(allowed: Sequence[str], known: Iterable[str]) -> None:
    """Refuses to let a name differ that is none of the options of the run.

    Raises:
        UserError: With those that come near.
    """
    names = sorted({*known, *FURTHER})
    for name in allowed:
        if name in names:
            continue
        last = name.rpartition(".")[2]
        near = [each for each in names if each.rpartition(".")[2] == last] or get_close_matches(name, names, n=1)
        hint = f"did you mean {' or '.join(near)}?" if near else "name an option whose value differs, as optim.lr"
        raise UserError(f"resume.allow: the run has no option {name}; {hint}")


def dotted(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a configuration as YAML has it, by the dotted names of their options."""
    found: dict[str, Any] = {}
    for name, value in plain.items():
        inside = value if isinstance(value, Mapping) else {}
        found |= {f"{name}.{each}": inner for each, inner in inside.items()} or {name: value}
    return found


def check_epochs(epochs: int, train: Mapping[str, Any], run_dir: Path) -> None:
    """Refuses to go on with a run to fewer epochs than it has trained: it would train nothing.

    Args:
        epochs: Those that it is to have.
        train: The state of its last checkpoint, by the names of :class:`~pipetransformer.planning.state.TrainState`.
        run_dir: Its folder.

    Raises:
        UserError: The checkpoint lies beyond their end.
    """
    epoch, step_in_epoch, step = (train.get(name, 0) for name in ("epoch", "step_in_epoch", "step"))
    num_needed = epoch + (step_in_epoch > 0)
    if epochs < num_needed:
        raise UserError(
            f"epochs={epochs} ends before step {step:,} in epoch {num_needed}, the last checkpoint of the run in "
            f"{run_dir}; give epochs={num_needed} or more"
        )


def _is_judged(settings: Settings) -> bool:
    return any(settings.get(name) is not None for name in ("evaluate.patience", "freeze.guard"))


def _show(settings: Settings, name: str) -> str:
    return json.dumps(settings[name], default=str) if name in settings else "nothing"

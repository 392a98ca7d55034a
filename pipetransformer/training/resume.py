"""Resuming a run: the checkpoint to take, the settings that must not differ, and the log up to there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipetransformer.checkpoint.folder import FOLDER, newest_whole, open_checkpoints, problem_with
from pipetransformer.checkpoint.manifest import LayerFile, Manifest
from pipetransformer.checkpoint.source import CheckpointLayers
from pipetransformer.config.resuming import changes, check_allowed, check_epochs
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Parallel
from pipetransformer.data.base import Data, Split, evenly_spaced
from pipetransformer.data.map_style import MapStyleData
from pipetransformer.errors import UserError
from pipetransformer.models.stack import LayerStack
from pipetransformer.report.event_log import EVENT_LOG
from pipetransformer.report.secrets import redact
from pipetransformer.runtime.groups import broadcast_from_rank0

NUM_TARGETS = 1024  # of them the data's digest counts; its identity counts every input


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files all have their digests.

    Attributes:
        folder: Where it is.
        manifest: All but its tensors.
        notes: Newer checkpoints that were passed over, each with the reason.
        log_end: Bytes of the run's event log when it was found; what this process writes comes after them.
    """

    folder: Path
    manifest: Manifest
    notes: tuple[str, ...]
    log_end: int | None = None


@dataclass(frozen=True)
class Resumed:
    """A checkpoint whose weights the model takes.

    Attributes:
        layers: Give the optimizer state to the first transition.
        data: Digest of the training data.
    """

    checkpoint: Checkpoint
    layers: CheckpointLayers
    data: dict[str, Any]


def resume(checkpoint: Checkpoint, config: Config, data: Data, stack: LayerStack) -> Resumed:
    """Gives a model the weights of a checkpoint, in place of its initial ones.

    Raises:
        UserError: The checkpoint was written with other settings or data, or is of another model.
    """
    digest = data_digest(data.train)
    check_settings(checkpoint, config, digest)
    layers = CheckpointLayers(checkpoint.folder, checkpoint.manifest, stack)
    stack.source = layers.weights
    for index in range(len(stack)):
        if stack[index].has_storage:  # of a family that makes its layers with weights
            stack.load_again(index)
    return Resumed(checkpoint, layers, digest)


def wanted_checkpoint(config: Config, run_dir: Path) -> Checkpoint | None:
    """Returns the checkpoint from which a run goes on; ``None`` for one that starts. Collective.

    Raises:
        UserError: The run to be resumed has none, has trained more epochs than it is to have, or was written with other
            settings. Those of the data wait for the data.
    """
    if config.resume.run is None:
        return None
    checkpoint = find_checkpoint(run_dir)
    if checkpoint is None and config.resume.run != "auto":
        raise UserError(
            f"resume={config.resume.run}: there is no checkpoint in {run_dir / FOLDER}; start anew with overwrite=true"
        )
    if checkpoint is None:
        return None
    check_epochs(config.epochs, checkpoint.manifest.train, run_dir)
    changed = changes(checkpoint.manifest.settings, settings_of(config), ())
    if not any(change.startswith("dataset") for change in changed):  # before log and tracker take it for a start
        check_settings(checkpoint, config, checkpoint.manifest.data)
    log = run_dir / EVENT_LOG
    return replace(checkpoint, log_end=log.stat().st_size if log.is_file() else 0)


def find_checkpoint(run_dir: Path, step: int | None = None) -> Checkpoint | None:
    """Finds the newest checkpoint of a run that is whole; ``None`` where there is none. Collective.

    Each rank reads a part of the files to compare them with their digests.

    Args:
        run_dir: The run folder.
        step: Only that of this step.

    Raises:
        UserError: There are checkpoints, and every one is damaged.
    """
    published = broadcast_from_rank0(open_checkpoints(run_dir / FOLDER))  # the folder may change while ranks look
    found, notes = newest_whole(published, step, _problem)
    if found is not None:
        return Checkpoint(*found, tuple(notes))
    if notes:
        raise UserError(f"{run_dir} has no whole checkpoint: {'; '.join(notes)}; start the run anew in another folder")
    return None


def _problem(folder: Path, layers: Sequence[LayerFile]) -> str | None:
    """Returns what is wrong with the files of a checkpoint, or ``None``; equal on every rank. Collective."""
    own = problem_with(folder, layers[dist.get_rank() :: dist.get_world_size()])
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, own)
    return next((problem for problem in problems if problem is not None), None)


def settings_of(config: Config) -> dict[str, Any]:
    """Returns the options of a run by their dotted names, as far as they are plain values, without keys and tokens."""
    settings: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if not is_dataclass(value):
            settings[each.name] = value
            continue
        settings[each.name] = _name_of_type(value)
        members = {member.name: getattr(value, member.name) for member in fields(value)} | _own_data(value)
        settings |= {f"{each.name}.{name}": _plain(member) for name, member in members.items()}
    if config.randomness == "device":
        settings["randomness.topology"] = _division(config.parallel)
    return redact(settings)


def _own_data(spec: Any) -> dict[str, Any]:
    """Returns the types of a script's own data sets: a list is one, too, and its samples have a digest."""
    if not isinstance(spec, MapStyleData):
        return {}
    evaluation = {name: _name_of_type(data) for name, data in spec.evaluation.items()}
    return {"train": _name_of_type(spec.train), "evaluation": evaluation}


def _division(parallel: Parallel) -> str:
    """Describes what decides how batches are divided, on which the device's own random numbers depend."""
    names = ["num_stages", "num_replicas", "num_microbatches"]
    if parallel.splits_stages:  # a mesh draws by sample
        names += ["tp", "cp", "dp_shard", "tp_algorithm"]
    fixed = (f"{name}={getattr(parallel, name)}" for name in names)
    return ", ".join((f"{dist.get_world_size()} ranks", f"parallel={parallel.arrangement}", *fixed))


def _plain(value: Any) -> Any:
    """Returns what JSON can hold; of any other object the name of its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _name_of_type(value)


def _name_of_type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def check_settings(checkpoint: Checkpoint, config: Config, data: Mapping[str, Any]) -> None:
    """Refuses to go on with settings, data or a number of epochs under which the result would be another one.

    Raises:
        UserError: With each such option, its old and its new value; or an option that may differ is unknown.
    """
    fits = checkpoint.manifest.fits(data["num_samples"], config.batch_size)
    allowed = [name for name in config.resume.allow if fits and name != "seed"]
    old, new = checkpoint.manifest.settings, settings_of(config)
    check_allowed(config.resume.allow, [*old, *new])
    changed = changes(old, new, allowed)
    if dict(data) != checkpoint.manifest.data and "dataset" not in allowed:
        changed.append(f"dataset: {checkpoint.manifest.data} -> {dict(data)}")
    names = [change.partition(":")[0] for change in changed]
    if changed and fits and "seed" not in names:
        names = [*config.resume.allow, *names]
        raise UserError(
            f"{checkpoint.folder} was written with other settings, under which the run would end otherwise "
            f"({'; '.join(changed)}); give the old ones, or resume.allow=[{','.join(names)}] to go on with the new ones"
        )
    if changed:
        raise UserError(
            f"{checkpoint.folder} was written with other settings, with which no run can go on ({'; '.join(changed)}); "
            "give the old ones: the seed, the data and the batch_size are those of the order of its samples"
        )


def data_digest(split: Split) -> dict[str, Any]:
    """Returns the digest of the training samples in their order, and their number."""
    ids = evenly_spaced(len(split), NUM_TARGETS)
    digest = blake2b(split.quick_identity().encode(), digest_size=16)
    digest.update(split.targets(ids).double().numpy().tobytes())
    return {"train": digest.hexdigest(), "num_samples": len(split)}


def cut_log(log: Path, num_bytes: int, end: int | None = None, back_to: int | None = None) -> tuple[int, int]:
    """Cuts an event log back to where a checkpoint was made; the run writes the steps after it again.

    Args:
        num_bytes: Of the log when the checkpoint was made. A log that is shorter, after a loss of power, is cut back to
            its last whole line.
        end: Where the events begin that this process has written, which stay; ``None``: nothing stays.
        back_to: Step to which this process rolls the run back: what the log tells of its restarts stays, at most there.

    Returns:
        Steps that the run loses: those in the part that was cut, and those that an attempt in it had lost; and the
        number of the last attempt in it, 0 where there was none.
    """
    if not log.is_file():
        return 0, 0
    end = log.stat().st_size if end is None else end
    is_short = end < num_bytes
    with log.open("r+b") as file:
        num_bytes = file.read(end).rfind(b"\n") + 1 if is_short else num_bytes
        if end == num_bytes:
            return 0, 0
        file.seek(num_bytes)
        lines, own = file.read(end - num_bytes).splitlines(keepends=True), file.read()
        told = [] if back_to is None else [_moved(each, back_to) for each in _attempts(lines)]
        file.seek(num_bytes)
        file.write(b"".join([*told, own]))
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    return (0, 0) if is_short else _lost(lines)


def _attempts(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Returns the events by which runs went on among lines of a log."""
    return [json.loads(line) for line in lines if b'"event": "resume"' in line and line.endswith(b"\n")]


def _moved(event: Mapping[str, Any], step: int) -> bytes:
    """Returns the line of an event as if it had come no later than a step."""
    moved = {**event, "step": min(event["step"], step)}
    return (json.dumps(moved, ensure_ascii=False) + "\n").encode()


def _lost(lines: Sequence[bytes]) -> tuple[int, int]:
    """Returns the steps in lines of a log and those that attempts in them had lost, and the number of the last one."""
    attempts = _attempts(lines)  # from the same checkpoint
    num_steps = sum(b'"event": "step"' in line for line in lines) + sum(each["num_steps_lost"] for each in attempts)
    return num_steps, attempts[-1].get("num_resumes", 0) if attempts else 0  # logs of earlier releases do not tell

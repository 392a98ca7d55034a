"""The model of a run that was saved: its weights, from a checkpoint or its end, and its export for its library."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from pipetransformer.checkpoint.folder import FOLDER, newest_whole, open_checkpoints, problem_with
from pipetransformer.checkpoint.manifest import Manifest
from pipetransformer.checkpoint.source import CheckpointLayers
from pipetransformer.config.schema import Config
from pipetransformer.data.base import Data, DatasetSpec, load_data
from pipetransformer.data.tables.base import shown
from pipetransformer.data.tables.labelled import LabelledTable, another_task, listed, task_of
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head
from pipetransformer.models.stack import LayerStack
from pipetransformer.report.card import write_card
from pipetransformer.report.run_folder import read_run, saved_model, share_files
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.build import wanted_format
from pipetransformer.training.resume import data_digest


@dataclass(frozen=True)
class SavedModel:
    """A run folder with the weights that are asked for.

    Attributes:
        stack: The model; its layers load their weights from the run.
        step: Step of the weights; ``None`` for a saved model of which no summary tells.
    """

    config: Config
    stack: LayerStack
    step: int | None


@dataclass(frozen=True)
class SavedRun(SavedModel):
    """The same with the data of its configuration."""

    data: Data


def open_saved(run_dir: Path, config: Config, step: int | None = None) -> SavedRun:
    """Opens the weights of a run: a checkpoint, or where there is none the saved model.

    Args:
        run_dir: The run folder.
        config: Of the run; its data may be other data with the same classes.
        step: Of a checkpoint; ``None``: of the model that the run saved at its end, or else the newest that is whole.

    Raises:
        UserError: There is no such checkpoint and no model, or the data does not fit the model.
    """
    data = load_data(config.dataset, wanted_format(config))
    weights = _find_weights(run_dir, step)
    head, input_shape = recorded_head(run_dir)
    check_size("the data", data.input_shape, input_shape)
    _check_task(config.dataset, data.task.head, head)
    _check_labels(config.dataset, data.task.head, head)
    model = _open(weights, config, data.task.head, data.input_shape)
    return SavedRun(model.config, model.stack, model.step, data)


def is_own_data(run_dir: Path, config: Config) -> bool:
    """Returns whether data is that on which the run was trained, by the digest in its checkpoints.

    Args:
        config: Of the run, with the place of the data.
    """
    trained = [manifest.data for _, manifest in open_checkpoints(run_dir / FOLDER) if isinstance(manifest, Manifest)]
    with suppress(UserError):  # other data may have no split to evaluate on
        return bool(trained) and data_digest(load_data(config.dataset, wanted_format(config)).train) in trained
    return False


def _check_task(dataset: DatasetSpec, found: Head, trained: Head) -> None:
    """Raises UserError where other data was taken for another task, as values that are all whole are for classes."""
    if found.problem_type != trained.problem_type:
        known, other = task_of(trained), task_of(found)
        remedy = another_task(known, other) if isinstance(dataset, LabelledTable) else "data for the same task"
        raise UserError(f"the run has learned the task {known}, and this data was taken for {other}; give {remedy}")


def _check_labels(dataset: DatasetSpec, found: Head, trained: Head) -> None:
    """Raises UserError where other data has other classes, which would be scored by their numbers."""
    if found.labels != trained.labels:
        known, other = (shown(head.labels, most=10) or "no names" for head in (trained, found))
        option = f', as "dataset.labels={listed(trained.labels)}"' if hasattr(dataset, "labels") else ""
        raise UserError(
            f"the run has learned the classes {known}, and this data has {other}; give it the same ones{option}"
        )


def check_size(source: str, found: tuple[int, ...], trained: tuple[int, ...]) -> None:
    """Raises UserError for pictures of another shape than that for which the run's model was built."""
    if found != trained:
        is_other_size = len(found) == len(trained) == 3 and found[0] == trained[0] and trained[1] == trained[2]
        remedy = f"resize them, as model.image_size={trained[1]} does" if is_other_size else "convert them"
        raise UserError(
            f"{source} has pictures of shape {found} (channels, height, width), and the run was trained on {trained}; "
            f"{remedy}"
        )


def open_model(run_dir: Path, config: Config, step: int | None = None) -> SavedModel:
    """Opens the weights of a run as :func:`open_saved` does, by what the run has recorded: without its data.

    Raises:
        UserError: There are no such weights, or no record of the model's head.
    """
    head, input_shape = recorded_head(run_dir)
    return _open(_find_weights(run_dir, step), config, head, input_shape)


def recorded_head(run_dir: Path) -> tuple[Head, tuple[int, ...]]:
    """Returns the head of a run's model with the names of its classes, and the shape of its input.

    Raises:
        UserError: The record is damaged, or of an earlier release.
    """
    start = read_run(run_dir).start
    if "head" not in start:
        raise UserError(f"{run_dir} has no record of its model's head: an earlier release wrote it")
    head = start["head"]
    return Head(**head | {"labels": tuple(head["labels"])}), tuple(start["input_shape"])


class _Weights(NamedTuple):
    """The weights to open: a checkpoint, or where that is ``None`` the model that the run saved at its end."""

    model: Path
    model_step: int | None
    checkpoint: tuple[Path, Manifest] | None


def _open(weights: _Weights, config: Config, head: Head, input_shape: tuple[int, ...]) -> SavedModel:
    if weights.checkpoint is None:
        config = replace(config, model=config.peft.open_saved(config.model, weights.model))
    stack = config.model.build_meta(head, input_shape, config.seed)
    config.peft.apply(stack, config.seed)
    stack = stack.to(PRECISIONS[config.precision].param_dtype)
    if weights.checkpoint is None:
        config.peft.load_saved(stack, weights.model)
        return SavedModel(config, stack, weights.model_step)
    path, manifest = weights.checkpoint
    stack.source = CheckpointLayers(path, manifest, stack).averages
    return SavedModel(config, stack, manifest.step)


def _find_weights(run_dir: Path, step: int | None) -> _Weights:
    """Finds the weights of a step, or without one those of the run's end, or else the newest.

    Raises:
        UserError: There are none.
    """
    model, own_step = saved_model(run_dir)  # without a step: the run has not ended, or saved none
    opened = open_checkpoints(run_dir / FOLDER)
    found, problems = newest_whole(opened, own_step if step is None else step, problem_with)
    if found is None and step is None and not model.is_dir():  # that of the run's end is damaged, or gone
        found, problems = newest_whole(opened, None, problem_with)
    if found is None and step is not None:
        steps = [str(manifest.step) for _, manifest in opened if isinstance(manifest, Manifest)]
        told = "; ".join([f"it has {', '.join(steps) or 'none'}", *problems])
        raise UserError(f"{run_dir} has no whole checkpoint of step={step}: {told}")
    if found is None and (not model.is_dir() or (own_step is None and problems)):
        raise UserError("; ".join([f"{run_dir} has neither a whole checkpoint nor a saved model", *problems]))
    return _Weights(model, own_step, found)


def export(saved: SavedModel, run_dir: Path, folder: Path, merged: bool = False) -> None:
    """Writes the model with its card to a folder, as its library loads it.

    Args:
        saved: The weights.
        run_dir: The run folder, for the card.
        folder: Where to.
        merged: Add adapters to the weights, so that the model's own library loads them.

    Raises:
        UserError: The folder has files in it.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give another folder by out=")
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Tensor] = {}
    for index in range(len(saved.stack)):
        saved.stack.load(index)
        state |= {name: tensor.detach() for name, tensor in saved.stack[index].original_state().items()}
    model, peft = saved.config.model, saved.config.peft
    if merged:
        model.save(saved.stack, peft.merge(saved.stack, state), folder)
    else:
        peft.save(model, saved.stack, state, folder)
    write_card(run_dir, folder, saved.step)
    share_files(folder)

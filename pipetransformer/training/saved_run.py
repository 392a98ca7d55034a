"""The model of a run that was saved: exported for its library, or scored on a split, in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autopipe.plan import Plan
from pipetransformer.checkpoint.folder import FOLDER, newest_whole, open_checkpoints, problem_with
from pipetransformer.checkpoint.manifest import Manifest
from pipetransformer.checkpoint.source import CheckpointLayers
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Parallel
from pipetransformer.data.base import Data, DatasetSpec, ImageFormat, Split, TextFormat, load_data
from pipetransformer.data.tables.base import shown
from pipetransformer.data.tables.labelled import LabelledTable, another_task, listed, task_of
from pipetransformer.data.tasks import Task
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.schedules import REFERENCE_WIDTH
from pipetransformer.report.card import write_card
from pipetransformer.report.event_log import write_json
from pipetransformer.report.rows import row_writer
from pipetransformer.report.run_folder import read_run, saved_model, share_files
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.build import wanted_format
from pipetransformer.training.evaluate import metrics_of, predict_all
from pipetransformer.training.input_reader import open_inputs
from pipetransformer.training.loader import BatchLoader
from pipetransformer.training.resume import data_digest
from pipetransformer.training.world import open_world

METRICS = "metrics.json"


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
    _check_size("the data", data.input_shape, input_shape)
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


def _check_size(source: str, found: tuple[int, ...], trained: tuple[int, ...]) -> None:
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


def splits(data: Data, names: list[str]) -> list[Split]:
    """Returns the splits with these names; without names those that a run evaluates.

    Raises:
        UserError: There is none of a name, or the training split is drawn anew in each epoch.
    """
    there = {split.name: split for split in (data.train, *data.evaluation)}
    if unknown := [name for name in names if name not in there]:
        raise UserError(f"there is no split {unknown[0]}; choose of {', '.join(there)}")
    if data.random_transform and data.train.name in names:
        raise UserError(
            f"the split {data.train.name} is transformed at random; give dataset.augment=false, and of "
            "dataset.transforms= those alone that draw nothing"
        )
    return [there[name] for name in names] if names else list(data.evaluation)


def score(saved: SavedRun, names: list[str], folder: Path, with_predictions: bool) -> dict[str, dict[str, Any]]:
    """Scores splits, and writes their metrics and, if asked for, one line of JSON for each sample.

    Args:
        saved: The weights and the data.
        names: Of the splits; empty for those that a run evaluates.
        folder: Receives ``metrics.json`` and ``<split>.jsonl``, of which those of an earlier evaluation go.
        with_predictions: Write the predictions.

    Returns:
        For each split its metrics, and its number of samples as ``num_samples``.
    """
    chosen = splits(saved.data, names)
    folder.mkdir(parents=True, exist_ok=True)
    predictions = _predictions(saved, chosen)
    results = {
        split.name: metrics_of(split, found) | {"num_samples": split.num_scored}
        for split, found in zip(chosen, predictions, strict=True)
    }
    for split in (saved.data.train, *saved.data.evaluation):
        (folder / f"{split.name}.jsonl").unlink(missing_ok=True)
    write_json(folder / METRICS, {"step": saved.step, "dataset": saved.config.dataset.name, "splits": results})
    if with_predictions:
        for split, found in zip(chosen, predictions, strict=True):
            rows = (with_names(row, saved.data.task.head.labels) for row in split.rows(found))
            lines = (json.dumps(row, ensure_ascii=False) for row in rows)
            (folder / f"{split.name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return results


def _predictions(saved: SavedRun, chosen: list[Split]) -> list[np.ndarray]:
    """Computes the predictions of each split's samples in their order."""
    found = []
    with ExitStack() as closing:
        runtime = closing.enter_context(_runtime(saved, saved.data.task))
        inputs = closing.enter_context(open_inputs(saved.config, chosen, runtime.device)[0])
        for split in chosen:
            split.row_length = None  # a packed row has no prediction of each document
            loader = BatchLoader.uncached(split, saved.stack.hidden_shape, saved.config.seed, inputs)
            predictions = predict_all(runtime, loader, min(saved.config.batch_size, len(split)))
            assert predictions is not None, "this process has all stages"
            found.append(predictions)
    return found


def with_names(row: dict[str, Any], labels: tuple[str, ...]) -> dict[str, Any]:
    """Adds the names of the predicted and of the right class, or those of several, where classes have names."""
    named = dict[str, Any]()
    for key in ("prediction", "target"):
        found = row.get(key)  # a document has scores alone
        if labels and isinstance(found, int):
            named[f"{key}_label"] = labels[found]
        elif labels and isinstance(found, list) and len(found) == len(labels) and {*found} <= {0, 1}:
            named[f"{key}_labels"] = [name for name, has in zip(labels, found, strict=True) if has]
    return row | named


def predict(
    run_dir: Path, config: Config, source: Path, output: Path, step: int | None = None
) -> tuple[int, int | None]:
    """Predicts samples without targets, and writes a row for each.

    Args:
        run_dir: The run folder.
        config: Of the run; its data says how the samples are read, and need not be there.
        source: A file or folder with the samples.
        output: A new file that ends in ``.csv`` or ``.jsonl``.
        step: Of a checkpoint; see :func:`open_saved`.

    Returns:
        The number of rows, and the step of the weights.

    Raises:
        UserError: The samples cannot be read or do not fit the model, or the output is there already.
    """
    write = row_writer(output)
    if not source.exists():
        raise UserError(f"input={source} does not exist")
    head, input_shape = recorded_head(run_dir)
    samples = config.dataset.unlabelled(source, _wanted_again(config, input_shape), head)
    _check_size(f"input={source}", samples.input_shape, input_shape)
    saved = open_model(run_dir, config, step)
    with ExitStack() as closing:
        runtime = closing.enter_context(_runtime(saved, samples.task))
        inputs = closing.enter_context(open_inputs(config, [samples.split], runtime.device)[0])
        loader = BatchLoader.uncached(samples.split, saved.stack.hidden_shape, config.seed, inputs)
        predictions = predict_all(runtime, loader, min(config.batch_size, len(samples.split)))
    assert predictions is not None, "this process has all stages"
    return write(samples.split.rows(predictions)), saved.step


def _wanted_again(config: Config, input_shape: tuple[int, ...]) -> TextFormat | ImageFormat:
    """Returns the model's input as the run had it, which may have taken the channels from its data."""
    wanted = wanted_format(config)
    return replace(wanted, num_channels=input_shape[0]) if isinstance(wanted, ImageFormat) else wanted


@contextmanager
def _runtime(saved: SavedModel, task: Task) -> Iterator[ElasticRuntime]:
    """Yields the model on the one device of this process."""
    config, stack = saved.config, saved.stack
    parallel = Parallel(device=config.parallel.device)
    with open_world(parallel) as device, torch.no_grad():
        context = RankContext.create(device, PRECISIONS[config.precision], parallel.timeout_s)
        optim = config.optim.for_model(REFERENCE_WIDTH)  # it makes no step
        with ElasticRuntime(stack, task, optim, context) as runtime:
            frozen = stack.num_blocks  # without optimizer state or gradients
            runtime.apply_plan(Plan(frozen, 0, ((0, len(stack) - 1),), num_replicas=1, num_microbatches=1))
            yield runtime

"""Scores and predictions of a run's saved model, in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipetransformer.autopipe.plan import Plan
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Parallel
from pipetransformer.data.base import Data, ImageFormat, Split, TextFormat
from pipetransformer.data.tasks import Task
from pipetransformer.errors import UserError
from pipetransformer.optim.schedules import REFERENCE_WIDTH
from pipetransformer.report.event_log import write_json
from pipetransformer.report.rows import row_writer
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.build import wanted_format
from pipetransformer.training.evaluate import metrics_of, predict_all
from pipetransformer.training.input_reader import open_inputs
from pipetransformer.training.loader import BatchLoader
from pipetransformer.training.saved_run import SavedModel, SavedRun, check_size, open_model, recorded_head
from pipetransformer.training.world import open_world

METRICS = "metrics.json"


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
    check_size(f"input={source}", samples.input_shape, input_shape)
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

"""The model of a run that was saved: exported for its library, or scored on a split, in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipetransformer.autopipe.plan import Plan
from pipetransformer.checkpoint.folder import FOLDER, check_files, open_checkpoints
from pipetransformer.checkpoint.manifest import Manifest
from pipetransformer.checkpoint.source import CheckpointLayers
from pipetransformer.config.schema import Config, Parallel
from pipetransformer.data.base import Data, ImageFormat, Split, TextFormat
from pipetransformer.errors import DamagedCheckpoint, UserError
from pipetransformer.models.stack import LayerStack
from pipetransformer.report.card import write_card
from pipetransformer.report.run_folder import saved_model, share_files, write_json
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.evaluate import predict_all
from pipetransformer.training.loader import BatchLoader
from pipetransformer.training.world import open_world

METRICS = "metrics.json"


@dataclass(frozen=True)
class SavedRun:
    """A run folder with the weights that are asked for.

    Attributes:
        data: The data of the configuration.
        stack: The model; its layers load their weights from the run.
        step: Step of the weights; ``None`` for a saved model of which no summary tells.
    """

    config: Config
    data: Data
    stack: LayerStack
    step: int | None


def open_saved(run_dir: Path, config: Config, step: int | None = None) -> SavedRun:
    """Opens the weights of a run: a checkpoint, or where there is none the saved model.

    Args:
        run_dir: The run folder.
        config: Of the run; its data may be other data with the same classes.
        step: Of a checkpoint; ``None``: of the model that the run saved at its end, or else the newest that is whole.

    Raises:
        UserError: There is no such checkpoint and no model, or the data does not fit the model.
    """
    folder, own_step = saved_model(run_dir)
    found = _checkpoint(run_dir, step, folder, own_step)
    if found is None:
        config = replace(config, model=replace(config.model, name=str(folder), pretrained=True))
    wanted = config.model.input_format()
    data = config.dataset.load(TextFormat(**wanted) if config.model.modality == "text" else ImageFormat(**wanted))
    stack = config.model.build_meta(data.task.head, data.input_shape, config.seed)
    stack = stack.to(PRECISIONS[config.precision].param_dtype)
    if found is None:
        return SavedRun(config, data, stack, own_step)
    path, manifest = found
    stack.source = CheckpointLayers(path, manifest, stack).weights
    return SavedRun(config, data, stack, manifest.step)


def _checkpoint(run_dir: Path, step: int | None, model: Path, own_step: int | None) -> tuple[Path, Manifest] | None:
    """Returns the checkpoint to read; ``None`` where the saved model is it.

    Args:
        step: That the user asks for.
        model: Folder of the saved model, which need not be there.
        own_step: Step of the model that the run saved at its end; ``None``: it has not ended, or saved none.
    """
    wanted = own_step if step is None else step
    problems: list[str] = []
    steps: list[str] = []
    for path, found in open_checkpoints(run_dir / FOLDER):
        try:
            if isinstance(found, DamagedCheckpoint):
                raise found
            steps.append(str(found.step))
            if wanted in (None, found.step):
                check_files(path, found.layers)
                return path, found
        except DamagedCheckpoint as error:
            problems.append(str(error))
    if step is not None:
        told = "; ".join([f"it has {', '.join(steps) or 'none'}", *problems])
        raise UserError(f"{run_dir} has no whole checkpoint of step={step}: {told}")
    if model.is_dir() and (own_step is not None or not problems):
        return None
    raise UserError("; ".join([f"{run_dir} has neither a whole checkpoint nor a saved model", *problems]))


def export(saved: SavedRun, run_dir: Path, folder: Path) -> None:
    """Writes the model with its card to a folder, as its library loads it.

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
    saved.config.model.save(saved.stack, state, folder)
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
        raise UserError(f"the split {data.train.name} is transformed at random; give dataset.augment=false")
    return [there[name] for name in names] if names else list(data.evaluation)


def score(saved: SavedRun, names: list[str], folder: Path, with_predictions: bool) -> dict[str, dict[str, Any]]:
    """Scores splits, and writes their metrics and, if asked for, one line of JSON for each sample.

    Args:
        saved: The weights and the data.
        names: Of the splits; empty for those that a run evaluates.
        folder: Receives ``metrics.json`` and ``<split>.jsonl``.
        with_predictions: Write the predictions.

    Returns:
        For each split its metrics, and its number of samples as ``num_samples``.
    """
    results: dict[str, dict[str, Any]] = {}
    chosen = splits(saved.data, names)
    folder.mkdir(parents=True, exist_ok=True)
    with _runtime(saved) as runtime:
        for split in chosen:
            loader = BatchLoader.uncached(split, saved.stack.hidden_shape, saved.config.seed)
            predictions = predict_all(runtime, loader, min(saved.config.batch_size, len(split)))
            assert predictions is not None, "this process has all stages"
            results[split.name] = split.score(predictions) | {"num_samples": split.num_scored}
            if with_predictions:
                rows = (_with_label(row, saved.data.task.head.labels) for row in split.rows(predictions))
                lines = (json.dumps(row, ensure_ascii=False) for row in rows)
                (folder / f"{split.name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    write_json(folder / METRICS, {"step": saved.step, "dataset": saved.config.dataset.name, "splits": results})
    return results


def _with_label(row: dict[str, Any], labels: tuple[str, ...]) -> dict[str, Any]:
    """Adds the name of a predicted class, where classes have names."""
    return row | {"label": labels[row["prediction"]]} if labels and isinstance(row["prediction"], int) else row


@contextmanager
def _runtime(saved: SavedRun) -> Iterator[ElasticRuntime]:
    """Yields the model on the one device of this process."""
    config, stack = saved.config, saved.stack
    parallel = Parallel(device=config.parallel.device)
    with open_world(parallel) as device, torch.no_grad():
        context = RankContext.create(device, PRECISIONS[config.precision], parallel.timeout_s)
        with ElasticRuntime(stack, saved.data.task, config.optim, context) as runtime:
            frozen = stack.num_blocks  # without optimizer state or gradients
            runtime.apply_plan(Plan(frozen, 0, ((0, len(stack) - 1),), num_replicas=1, num_microbatches=1))
            yield runtime

"""The jobs of one sweep as one writes them by hand in PyTorch: ``python -m experiments.one_store.plain``.

Model, tokens, order of the samples, optimizer and learning rate are those of ``train.py``, so that the results have to
be equal. Only the frozen prefix is computed in other ways, see :data:`WAYS`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pipetransformer.autodp.sampler import batch_ids, epoch_order, num_batches
from pipetransformer.config.compose import compose_training
from pipetransformer.config.schema import Config
from pipetransformer.data.base import Data, Split, TextFormat
from pipetransformer.models.stack import LayerStack
from pipetransformer.report.event_log import write_json
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.loader import padded_length

RECOMPUTES, FILE = "recompute", "file"
WAYS = (RECOMPUTES, FILE)
"""``recompute`` runs the frozen prefix in every step, as SetFit runs its body in every epoch of its head. ``file``
computes the features of every sample once, and keeps them in a file with ``torch.save``."""

Features = Callable[[Split, np.ndarray], Tensor]
"""Returns the output of the frozen prefix for samples, shape (B, T, D)."""


def split_model(config: Config) -> tuple[Data, LayerStack]:
    """Reads data and model of a configuration with the frozen prefix in evaluation mode, without gradients."""
    data = config.dataset.load(TextFormat(**config.model.input_format()))
    stack = config.model.build(data.task.head, data.input_shape, config.seed)
    stack = stack.to(PRECISIONS[config.precision].param_dtype)
    for index in range(_first_active(config)):
        stack[index].eval().requires_grad_(False)
    return data, stack


def _first_active(config: Config) -> int:
    """Returns the first layer that trains; layer 0 is the embedding."""
    return config.freeze.frozen_at_start + 1


def _context(split: Split, ids: np.ndarray) -> dict[str, Tensor]:
    return split.context(ids.tolist(), padded_length(split, ids))


@torch.no_grad()
def prefix(stack: LayerStack, first_active: int, split: Split, ids: np.ndarray) -> Tensor:
    """Computes the output of the frozen prefix, shape (B, T, D)."""
    x = split.inputs(ids.tolist(), padded_length(split, ids))
    context = _context(split, ids)
    for index in range(first_active):
        x = stack[index](x, **context)
    return x


class FeatureFile:
    """The features of all samples in a file, each as long as its text.

    Args:
        file: Is written where it does not exist.
    """

    def __init__(self, file: Path, config: Config, data: Data, stack: LayerStack) -> None:
        if not file.exists():
            splits = (data.train, *data.evaluation)
            torch.save({split.name: _all_features(split, config, stack) for split in splits}, file)
        self._features: dict[str, list[Tensor]] = torch.load(file)

    def __call__(self, split: Split, ids: np.ndarray) -> Tensor:
        rows = pad_sequence([self._features[split.name][i] for i in ids], batch_first=True)
        length = padded_length(split, ids)
        assert length is not None, "texts have lengths"
        return nn.functional.pad(rows, (0, 0, 0, length - rows.shape[1]))


def _all_features(split: Split, config: Config, stack: LayerStack) -> list[Tensor]:
    """Computes the features of a split, each of shape (T of the sample, D)."""
    found, lengths = list[Tensor](), split.lengths
    assert lengths is not None
    for ids in _batches(np.arange(len(split)), config.batch_size):
        rows = prefix(stack, _first_active(config), split, ids)
        found += [row[: int(length)].clone() for row, length in zip(rows, lengths[ids], strict=True)]
    return found


def _batches(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    return [batch_ids(order, index, batch_size) for index in range(num_batches(len(order), batch_size))]


def train(config: Config, data: Data, stack: LayerStack, features: Features) -> dict[str, Any]:
    """Trains the layers above the prefix, and evaluates after each epoch.

    Returns:
        ``losses`` of every step, and the last ``metric``.
    """
    active = [stack[index].train() for index in range(_first_active(config), len(stack))]
    trainable = [parameter for layer in active for parameter in layer.parameters()]
    optimizer = config.optim.build(trainable)
    assert optimizer is not None
    assert config.optim.clip_norm is not None
    losses, metric = list[float](), 0.0
    num_steps = int(config.epochs) * num_batches(len(data.train), config.batch_size)
    for epoch in range(int(config.epochs)):
        for ids in _batches(epoch_order(len(data.train), epoch, config.seed), config.batch_size):
            output = _run(active, features(data.train, ids), data.train, ids)
            loss = nn.functional.cross_entropy(output, data.train.targets(ids.tolist()))
            loss.backward()
            nn.utils.clip_grad_norm_(trainable, config.optim.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = config.optim.rate(len(losses), num_steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        metric = evaluate(config, active, data.evaluation[0], features)
    return {"losses": losses, "metric": metric}


def _run(layers: Sequence[nn.Module], x: Tensor, split: Split, ids: np.ndarray) -> Tensor:
    context = _context(split, ids)
    for layer in layers:
        x = layer(x, **context)
    return x


@torch.no_grad()
def evaluate(config: Config, active: Sequence[nn.Module], split: Split, features: Features) -> float:
    """Returns the first metric of a split."""
    for layer in active:
        layer.eval()
    found = []
    for ids in _batches(np.arange(len(split)), config.batch_size):
        output = _run(active, features(split, ids), split, ids)
        found.append(split.predict(output, ids.tolist(), padded_length(split, ids)).numpy())
    for layer in active:
        layer.train()
    return next(iter(split.score(np.concatenate(found)).values()))


def main(way: str, folder: Path, rates: Sequence[float], options: Sequence[str]) -> list[dict[str, Any]]:
    """Trains one job for each rate, and writes what each gave to ``jobs.json``."""
    jobs = []
    folder.mkdir(parents=True, exist_ok=True)
    for rate in rates:
        began = time.perf_counter()
        config = compose_training([*options, f"optim.lr={rate}"])
        data, stack = split_model(config)
        features: Features = lambda split, ids, config=config, stack=stack: prefix(  # noqa: E731
            stack, _first_active(config), split, ids
        )
        if way == FILE:
            features = FeatureFile(folder.parent / "features.pt", config, data, stack)
        found = train(config, data, stack, features)
        jobs.append(found | {"lr": rate, "seconds": time.perf_counter() - began})
    write_json(folder / "jobs.json", jobs)
    return jobs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    given, others = parser.parse_known_args()
    torch.set_num_threads(1)
    main(given.way, given.folder, given.rates, others)

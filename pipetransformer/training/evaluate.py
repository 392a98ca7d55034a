"""Evaluation over all ranks, every sample once (design promise 5)."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch.distributed as dist
from torch import Tensor

from pipetransformer.autodp.sampler import batch_ids, num_batches
from pipetransformer.data.base import Split
from pipetransformer.errors import LoopLeft, UserError
from pipetransformer.metric import plain_metrics
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import broadcast_from_rank0
from pipetransformer.training.loader import BatchLoader, ComingBatch

ASK_EVERY = 16  # batches between two questions whether to leave, each of which is an all-reduce
Predictions = list[tuple[np.ndarray, np.ndarray]]


def evaluate(
    runtime: ElasticRuntime, loader: BatchLoader, batch_size: int, stops: Callable[[], bool] | None = None
) -> dict[str, float]:
    """Computes the metrics of a split under the current plan, equal on every rank. Collective.

    Args:
        stops: Returns on every rank alike whether to leave the loop; ``None`` never asks.

    Raises:
        LoopLeft: It was to be left.
    """
    predictions = predict_all(runtime, loader, batch_size, stops)
    return broadcast_from_rank0({} if predictions is None else metrics_of(loader.split, predictions))


def metrics_of(split: Split, predictions: np.ndarray) -> dict[str, float]:
    """Returns the metrics of a split, which may be the user's own, as plain numbers."""
    return plain_metrics(split.score(predictions), f"{type(split).__name__}.score of {split.name}")


def predict_all(
    runtime: ElasticRuntime, loader: BatchLoader, batch_size: int, stops: Callable[[], bool] | None = None
) -> np.ndarray | None:
    """Computes the predictions of a split's samples in their order, on rank 0; ``None`` on the others. Collective."""
    own = _predictions(runtime, loader, batch_size, stops)
    rank, world = dist.get_rank(), dist.get_world_size()
    gathered: list[Predictions] | None = [[] for _ in range(world)] if rank == 0 else None
    dist.gather_object(own, gathered)
    return None if gathered is None else _in_order(loader, [part for parts in gathered for part in parts])


def _predictions(
    runtime: ElasticRuntime, loader: BatchLoader, batch_size: int, stops: Callable[[], bool] | None
) -> Predictions:
    """Computes ids and predictions of this rank's samples; empty on all but last stages."""
    assert runtime.topology is not None
    order = np.arange(len(loader.split))
    own = []
    batches = [batch_ids(order, index, batch_size) for index in range(num_batches(len(order), batch_size))]
    loader.prefetch(map(ComingBatch, batches), runtime.topology, targets=False)
    with runtime.averaged():
        for number, global_ids in enumerate(batches):
            if stops is not None and number % ASK_EVERY == 0 and stops():
                raise LoopLeft
            evaluated = runtime.evaluate(loader, global_ids, partial(_predicted, loader, loader.padded(global_ids)))
            if evaluated is not None:
                own.append((evaluated.ids, evaluated.outputs.cpu().numpy()))
    return own


def _predicted(loader: BatchLoader, num_tokens: int | None, outputs: Tensor, ids: list[int]) -> Tensor:
    return loader.split.predict(outputs, ids, num_tokens)


def _in_order(loader: BatchLoader, parts: Predictions) -> np.ndarray:
    ids = np.concatenate([part[0] for part in parts])
    assert len(ids) == len(loader.split) == len(np.unique(ids)), "every sample is counted once"
    parts = [part for part in parts if len(part[0])]
    fewest, most = (chosen(predicted[0].size for _, predicted in parts) for chosen in (min, max))
    if fewest != most:
        raise UserError(
            f"a sample of {loader.split.name} has an output of {fewest} numbers in one batch and of {most} in another, "
            "and `metrics` take all in one shape; bring the inputs to one length, or leave `metrics` out"
        )
    return np.concatenate([part[1] for part in parts])[np.argsort(ids)]

"""Features of the runtime, each broken on purpose, to see that the comparison with one process notices."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.autocache.store import FeatureStore
from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime import signals
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.engine import Engine
from pipetransformer.runtime.holdings import Holdings
from pipetransformer.runtime.stage import Stage
from pipetransformer.runtime.ties import TiedGradients
from support.cases import Case
from support.trainings import Plans, Trace, train_elastic

_read, _weighted_targets, _unpack = FeatureStore.read, Batch.weighted_targets, Holdings.unpack
_batch_to, _clip, _train = Batch.to, signals.clip, Stage.train


def _mean_of_the_share(self: Engine, output: Tensor, weighted_targets: Tensor) -> Tensor:
    per_sample = self._objective.loss(output, weighted_targets[:, :-1].squeeze(1))
    return per_sample.mean() / self.plan.num_microbatches


def _padding_counts(self: Batch) -> Tensor | None:
    self.weights = torch.ones_like(self.weights)
    return _weighted_targets(self)


def _keys_by_rank(self: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    self.keys = self.keys + dist.get_rank()
    return _batch_to(self, device, dtype)


def _clip_by_stage(parameters: signals.ByLayer, total_norm: float, clip_norm: float | None) -> None:
    own = torch.nn.utils.get_total_norm([p.grad for layer in parameters.values() for p in layer if p.grad is not None])
    _clip(parameters, float(own), clip_norm)


def _weights_drift(self: Holdings, layer: int, manifest: Any, data: Tensor) -> None:
    _unpack(self, layer, manifest, data)
    with torch.no_grad():
        for parameter in self.stack[layer].parameters():
            parameter *= 1 + 1e-6


def _half_precision(self: FeatureStore, ids: Any, num_tokens: int) -> Tensor:
    return _read(self, ids, num_tokens).to(torch.bfloat16).to(torch.float64)


def _prefix_trains(self: Stage, mode: bool = True) -> Stage:
    return torch.nn.Module.train(self, mode)  # type: ignore[return-value]


def _all_parameters(self: LayerStack, layer: int, *_: int) -> list[torch.nn.Parameter]:
    return list(self[layer].parameters())


MUTATIONS: dict[str, Callable[[], Any]] = {
    "each replica takes the mean of its own share": lambda: mock.patch.object(
        Engine, "_scaled_loss", _mean_of_the_share
    ),
    "padded rows count in the loss": lambda: mock.patch.object(Batch, "weighted_targets", _padding_counts),
    "optimizer state stays behind": lambda: mock.patch.object(Holdings, "give_state"),
    "moved weights are not those that were sent": lambda: mock.patch.object(Holdings, "unpack", _weights_drift),
    "gradients are clipped by the norm of the stage": lambda: mock.patch.object(signals, "clip", _clip_by_stage),
    "features lose precision in the cache": lambda: mock.patch.object(FeatureStore, "read", _half_precision),
    "dropout depends on the rank": lambda: mock.patch.object(Batch, "to", _keys_by_rank),
    "the frozen prefix draws dropout": lambda: mock.patch.object(Stage, "train", _prefix_trains),
}
TIED_MUTATIONS: dict[str, Callable[[], Any]] = {
    "the copies' gradients are not summed": lambda: mock.patch.object(TiedGradients, "add_up"),
    "a shared weight counts in the norm of each layer": lambda: mock.patch.object(
        LayerStack, "own_parameters", _all_parameters
    ),
    "the head's copy trains on when the embedding is frozen": lambda: mock.patch.object(
        LayerStack, "trainable", _all_parameters
    ),
}
"""What a model with shared weights notices."""


def train_mutated(mutation: str, case: Case, plans: Plans, folder: str) -> Trace:
    with (MUTATIONS | TIED_MUTATIONS)[mutation]():
        return train_elastic(case, plans, folder)

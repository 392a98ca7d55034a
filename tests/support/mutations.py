"""Features of the runtime, each broken on purpose, to see that the comparison with one process notices."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetransformer.autocache.cache import AutoCache, Filled
from pipetransformer.autocache.reader import FeatureReader, Request
from pipetransformer.autodp.topology import Topology
from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime import gradients
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.engine import Engine
from pipetransformer.runtime.gradients import TiedWeights
from pipetransformer.runtime.precision import LossScale, Precision
from pipetransformer.runtime.resident import ResidentLayers
from pipetransformer.runtime.stage import ParametersByLayer, Stage
from pipetransformer.training.loader import BatchLoader
from support.cases import Case
from support.trainings import Plans, Trace, train_elastic

_advance, _read, _loss_targets = AutoCache.advance, FeatureReader.read, Batch.loss_targets
_batch = BatchLoader.batch
_unpack, _stash = ResidentLayers.unpack, ResidentLayers.stash_optimizer_state
_restore = ResidentLayers.restore_optimizer_state
_batch_to, _clip, _train, _run = Batch.to, gradients.unscale_and_clip, Stage.train, Precision.run_layer


def _mean_of_the_share(self: Engine, output: Tensor, loss_targets: Tensor) -> Tensor:
    per_sample = self._objective.loss(output, loss_targets[:, :-2].squeeze(1))
    return per_sample.mean() / self.plan.num_microbatches


def _padding_counts(self: Batch, factor: float) -> Tensor | None:
    self.weights = torch.ones_like(self.weights)
    return _loss_targets(self, factor)


def _keys_by_rank(self: Batch, device: torch.device, dtype: torch.dtype, keys_on_host: bool = False) -> Batch:
    self.keys = self.keys + dist.get_rank()
    return _batch_to(self, device, dtype, keys_on_host)


def _clip_by_stage(
    parameters: ParametersByLayer, total_norm: Tensor | float, clip_norm: float | None, loss_scale: float
) -> Tensor:
    own = torch.nn.utils.get_total_norm([p.grad for layer in parameters.values() for p in layer if p.grad is not None])
    return _clip(parameters, own, clip_norm, loss_scale)


def _norms_of_the_own_part(squared_norms: Tensor, parts: dist.ProcessGroup) -> Tensor:
    return squared_norms


def _weights_drift(self: ResidentLayers, layer: int, manifest: Any, data: Tensor) -> None:
    _unpack(self, layer, manifest, data)
    with torch.no_grad():
        for parameter in self.stack[layer].parameters():
            parameter *= 1 + 1e-6


def _without_state(self: ResidentLayers, layer: int, manifest: Any, data: Tensor) -> None:
    _unpack(self, layer, manifest, data)
    self.optimizer_state.pop(layer, None)


def _forgets(self: ResidentLayers, optimizer: Optimizer | None, first_active: int) -> None:
    self.parks = False
    _stash(self, optimizer, first_active)


def _remembers(self: ResidentLayers, optimizer: Optimizer | None, first_active: int) -> None:
    self.parks = True
    _stash(self, optimizer, first_active)


def _of_the_layer_above(self: ResidentLayers, optimizer: Optimizer | None, first_active: int) -> None:
    """Blocks get what the block above them froze with."""
    blocks = sorted(index for index in self.optimizer_state if 0 < index < first_active)
    states = [self.optimizer_state[index] for index in blocks]
    self.optimizer_state |= dict(zip(blocks, states[1:] + states[:1], strict=True))
    _restore(self, optimizer, first_active)


def _of_the_first_freeze(self: ResidentLayers, optimizer: Optimizer | None, first_active: int) -> None:
    """What was parked once is taken for what freezes later, too."""
    known = self.__dict__.setdefault("known", {})
    for index, state in self.optimizer_state.items():
        known.setdefault(index, copy.deepcopy(state))
    _stash(self, optimizer, first_active)
    for index in known.keys() & self.optimizer_state.keys() & set(range(first_active)):
        self.optimizer_state[index] = copy.deepcopy(known[index])


def _copies_lose_theirs(self: ResidentLayers, optimizer: Optimizer | None, first_active: int) -> None:
    """State of frozen weights of layers that train on is dropped."""
    _restore(self, optimizer, first_active)
    for index in range(first_active, len(self.stack)):
        self.optimizer_state.pop(index, None)


def _half_precision(self: FeatureReader, request: Request) -> Tensor:
    return _read(self, request).to(torch.bfloat16).to(torch.float64)


def _key_stays(self: AutoCache, level: int, *arguments: Any) -> Filled:
    if self.level == 0:
        return _advance(self, level, *arguments)
    self.level = level
    return Filled(0, 0)


def _run_in_param_dtype(self: Precision, layer: nn.Module, x: Tensor, context: dict[str, Any]) -> Tensor:
    return layer(x, **context)


def _run_rounded(self: Precision, layer: nn.Module, x: Tensor, context: dict[str, Any]) -> Tensor:
    return _run(self, layer, x, context).to(self.compute_dtype).to(self.param_dtype)


def _still_scaled(self: LossScale, squared_norms: list[float]) -> list[float]:
    return squared_norms


def _clip_scaled(
    parameters: ParametersByLayer, total_norm: Tensor | float, clip_norm: float | None, loss_scale: float
) -> Tensor:
    return _clip(parameters, total_norm, clip_norm, 1.0)


def _prefix_trains(self: Stage, mode: bool = True) -> Stage:
    return torch.nn.Module.train(self, mode)  # type: ignore[return-value]


def _all_parameters(self: LayerStack, layer: int, *_: int) -> list[torch.nn.Parameter]:
    return list(self[layer].parameters())


def _number_of_samples(self: BatchLoader, global_ids: np.ndarray) -> float:
    return float(len(global_ids))


def _divided_by_own_tokens(self: BatchLoader, ids: np.ndarray, topology: Topology, *options: Any) -> Batch:
    batch = _batch(self, ids, topology, *options)
    assert self.split.loss_weights is not None
    own = self.split.loss_weights[batch.ids] * batch.weights.numpy()
    batch.loss_divisor = (float(own.sum()) or 1.0) * topology.plan.num_replicas
    return batch


MUTATIONS: dict[str, Callable[[], Any]] = {
    "each replica takes the mean of its own share": lambda: mock.patch.object(Engine, "_loss", _mean_of_the_share),
    "padded rows count in the loss": lambda: mock.patch.object(Batch, "loss_targets", _padding_counts),
    "optimizer state stays behind": lambda: mock.patch.object(ResidentLayers, "restore_optimizer_state"),
    "moved weights are not those that were sent": lambda: mock.patch.object(ResidentLayers, "unpack", _weights_drift),
    "gradients are clipped by the norm of the stage": lambda: mock.patch.object(
        gradients, "unscale_and_clip", _clip_by_stage
    ),
    "norms are those of the part that a rank has": lambda: mock.patch.object(
        gradients, "all_reduce_squared_norms", _norms_of_the_own_part
    ),
    "features lose precision in the cache": lambda: mock.patch.object(FeatureReader, "read", _half_precision),
    "dropout depends on the rank": lambda: mock.patch.object(Batch, "to", _keys_by_rank),
    "the frozen prefix draws dropout": lambda: mock.patch.object(Stage, "train", _prefix_trains),
}
CACHED_MUTATIONS: dict[str, Callable[[], Any]] = {
    "what is missing is read as zero": lambda: mock.patch.object(FeatureReader, "_recompute"),
    "the old level is read on": lambda: mock.patch.object(AutoCache, "advance", _key_stays),
}
"""Mutations that a training with a partial cache notices."""

TIED_MUTATIONS: dict[str, Callable[[], Any]] = {
    "the copies' gradients are not summed": lambda: mock.patch.object(TiedWeights, "all_reduce"),
    "a shared weight counts in the norm of each layer": lambda: mock.patch.object(
        LayerStack, "own_parameters", _all_parameters
    ),
    "the head's copy trains on when the embedding is frozen": lambda: mock.patch.object(
        LayerStack, "trainable", _all_parameters
    ),
}
"""Mutations that a model with shared weights notices."""


UNFREEZE_MUTATIONS: dict[str, Callable[[], Any]] = {
    "state stays behind when its frozen layer moves": lambda: mock.patch.object(
        ResidentLayers, "unpack", _without_state
    ),
    "state is forgotten where it is to be kept": lambda: mock.patch.object(
        ResidentLayers, "stash_optimizer_state", _forgets
    ),
    "state is kept where it is to be forgotten": lambda: mock.patch.object(
        ResidentLayers, "stash_optimizer_state", _remembers
    ),
    "blocks get the state of another one": lambda: mock.patch.object(
        ResidentLayers, "restore_optimizer_state", _of_the_layer_above
    ),
    "a second freeze brings the state of the first": lambda: mock.patch.object(
        ResidentLayers, "stash_optimizer_state", _of_the_first_freeze
    ),
    "copies of a shared weight lose their state": lambda: mock.patch.object(
        ResidentLayers, "restore_optimizer_state", _copies_lose_theirs
    ),
}
"""Mutations that a training notices whose blocks train again."""


TOKEN_MUTATIONS: dict[str, Callable[[], Any]] = {
    "the loss is divided by samples": lambda: mock.patch.object(BatchLoader, "_loss_divisor", _number_of_samples),
    "each replica divides by its own tokens": lambda: mock.patch.object(BatchLoader, "batch", _divided_by_own_tokens),
}
"""Mutations that a task with a target for each token notices."""


MIXED_MUTATIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "products have the type of the weights": (
        "bfloat16", lambda: mock.patch.object(Precision, "run_layer", _run_in_param_dtype),
    ),
    "what leaves a layer is rounded": ("bfloat16", lambda: mock.patch.object(Precision, "run_layer", _run_rounded)),
    "casts of weights outlive the optimizer's step": ("bfloat16", lambda: torch.autocast("cpu", enabled=False)),
    "the loss scale stays in the norms": ("float16", lambda: mock.patch.object(LossScale, "unscaled", _still_scaled)),
    "the loss scale stays in the gradients": (
        "float16", lambda: mock.patch.object(gradients, "unscale_and_clip", _clip_scaled),
    ),
}  # fmt: skip
"""Mutations of mixed precision, each with the precision that notices it."""


def train_mutated(mutation: str, case: Case, plans: Plans, folder: str) -> Trace:
    broken = MUTATIONS | CACHED_MUTATIONS | TIED_MUTATIONS | TOKEN_MUTATIONS | UNFREEZE_MUTATIONS
    broken |= {name: way for name, (_, way) in MIXED_MUTATIONS.items()}
    with broken[mutation]():
        return train_elastic(case, plans, folder)

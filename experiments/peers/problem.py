"""What all loops have in common: model, data, optimizer, learning rate, freezing and evaluation.

A peer's loop wraps :class:`Objective`, takes its batches from :meth:`Problem.loader`, and calls :class:`Watch` before
and after each step. All that is left to it is what it is compared for: the loop, and how gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Sampler

from pipetransformer.autodp.sampler import SampleOrder, batch_ids, num_batches, replica_batch
from pipetransformer.config.schema import Config
from pipetransformer.data.base import Data, ImageFormat, Split, TextFormat
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.build import sample_order
from pipetransformer.training.loader import padded_length

Batch = dict[str, Tensor]
Freezes = Sequence[tuple[int, int]]
"""Steps before which a prefix freezes, with its blocks: ``[(188, 2), (376, 4)]``."""


class Objective(nn.Module):
    """The model with its loss, as every loop trains it.

    Attributes:
        losses: This rank's part of the loss of each step; their mean over the ranks is that of the global batch.
    """

    def __init__(self, stack: LayerStack, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        assert not stack.ties, "a weight that layers share would have to be told to each peer"
        self.stack, self._loss, self._num_frozen_layers = stack, loss, 0
        self.losses: list[Tensor] = []

    def forward(
        self, inputs: Tensor, targets: Tensor, weights: Tensor, divisor: Tensor, **context: Tensor
    ) -> dict[str, Tensor]:
        """Returns ``loss``: the sum over this rank's samples, times the ranks, over the size of the global batch.

        Averaged over the ranks, its gradient is that of the global batch, also where ranks have unequal shares of it.
        """
        loss = (self._loss(self.stack(inputs, **context), targets) * weights).sum() / divisor
        self.losses.append(loss.detach())
        return {"loss": loss}

    def freeze(self, num_frozen: int) -> None:
        """Takes the gradient, and the dropout, from the embedding and so many blocks."""
        self._num_frozen_layers = num_frozen + 1
        for layer in self._frozen():
            layer.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Objective:
        """Keeps frozen layers in evaluation mode, whatever a loop asks for in each step."""
        super().train(mode)
        for layer in self._frozen():
            layer.eval()
        return self

    def _frozen(self) -> list[nn.Module]:
        return [self.stack[index] for index in range(self._num_frozen_layers)]


@dataclass(frozen=True)
class Problem:
    """One run's model and data on this rank.

    Attributes:
        config: The options of ``train.py``.
        optim: With the peak learning rate.
    """

    config: Config
    data: Data
    model: Objective
    optim: OptimizerSpec

    @classmethod
    def load(cls, config: Config) -> Problem:
        """Reads data and model, as a run of ``train.py`` does."""
        wanted = config.model.input_format()
        data = config.dataset.load(TextFormat(**wanted) if config.model.modality == "text" else ImageFormat(**wanted))
        assert not data.random_transform, "the peers read each sample as it is"
        stack = config.model.build(data.task.head, data.input_shape, config.seed)
        stack = stack.to(PRECISIONS[config.precision].param_dtype)
        first = data.train.inputs([0], padded_length(data.train, np.zeros(1, dtype=np.int64)))
        width = stack.hidden_shape(first)[-1]
        optim = config.optim.for_model(width, config.peft.rate_factor, config.model.pretrained)
        return cls(config, data, Objective(stack, data.task.loss), optim)

    @property
    def num_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        return num_batches(len(self.data.train), self.config.batch_size)

    @property
    def clip_norm(self) -> float:
        assert self.optim.clip_norm is not None, "each peer clips"
        return self.optim.clip_norm

    def optimizer(self) -> tuple[Optimizer, LambdaLR]:
        """Builds the optimizer over what trains, and its learning rate by the step."""
        stack = self.model.stack
        optimizer = self.optim.build_layers({index: stack[index].parameters() for index in range(len(stack))})
        assert optimizer is not None
        return optimizer, LambdaLR(optimizer, lambda step: self.optim.rate(step, self.num_steps) / self.optim.peak)

    def loader(self) -> DataLoader[Batch]:
        """Returns this rank's rows of every global batch of the run, in the order in which ``train.py`` takes them."""
        batches = GlobalBatches(sample_order(self.config, self.data)[0], self.config.epochs)
        rows = OwnRows(self.data.train, PRECISIONS[self.config.precision].param_dtype)
        return DataLoader(range(len(self.data.train)), batch_sampler=batches, collate_fn=rows)  # type: ignore[arg-type]


class GlobalBatches(Sampler[list[int]]):
    """The samples of each global batch of a run, on every rank alike; one pass over it is the whole run."""

    def __init__(self, order: SampleOrder, num_epochs: int) -> None:
        self._order, self._num_steps = order, num_epochs * num_batches(order.num_samples, order.batch_size)

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[list[int]]:
        return (ids.tolist() for ids in self._order.batches(0, len(self)))


class OwnRows:
    """Loads this rank's rows of a global batch, padded as all of it."""

    def __init__(self, split: Split, dtype: torch.dtype) -> None:
        self._split, self._dtype = split, dtype

    def __call__(self, global_ids: list[int]) -> Batch:
        split, num_ranks, ids = self._split, dist.get_world_size(), np.array(global_ids)
        own, num_tokens = replica_batch(ids, dist.get_rank(), num_ranks, 1), padded_length(self._split, ids)
        rows = own.ids.tolist()
        inputs = split.inputs(rows, num_tokens)
        total = len(ids) if split.loss_weights is None else float(split.loss_weights[ids].sum())
        return split.context(rows, num_tokens) | {
            "inputs": inputs.to(self._dtype) if inputs.is_floating_point() else inputs,
            "targets": split.targets(rows, num_tokens),
            "weights": torch.from_numpy(own.weights).to(self._dtype),
            "divisor": torch.tensor(total / num_ranks, dtype=self._dtype),
        }


@dataclass
class Watch:
    """What happens between the steps of a loop: blocks freeze by a schedule, and the model is evaluated.

    Attributes:
        metrics: Of each evaluation, on rank 0.
    """

    problem: Problem
    freezes: Freezes = ()
    metrics: list[dict[str, float]] = field(default_factory=list)

    def before_step(self, step: int) -> bool:
        """Freezes where the schedule says so; returns True where other parameters train from here on."""
        wanted = [num_frozen for at, num_frozen in self.freezes if at == step]
        for num_frozen in wanted:
            self.problem.model.freeze(num_frozen)
        return bool(wanted)

    def after_step(self, step: int) -> None:
        """Evaluates where ``evaluate.every_epochs`` says so, and at the end. Every rank calls it."""
        num_epochs, rest = divmod(step + 1, self.problem.steps_per_epoch)
        every = self.problem.config.evaluate.every_epochs
        if step + 1 == self.problem.num_steps or (every is not None and rest == 0 and num_epochs % every == 0):
            self.metrics.append(evaluate(self.problem))


@torch.no_grad()
def evaluate(problem: Problem) -> dict[str, float]:
    """Computes the metrics of the main split over all ranks, each sample once; empty on all ranks but 0."""
    split, batch_size = problem.data.evaluation[0], problem.config.batch_size
    dtype, order = PRECISIONS[problem.config.precision].param_dtype, np.arange(len(split))
    problem.model.eval()
    own: list[tuple[np.ndarray, np.ndarray]] = []
    for index in range(num_batches(len(split), batch_size)):
        own.append(_predict(problem.model.stack, split, batch_ids(order, index, batch_size), dtype))
    problem.model.train()
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, parts)
    if parts is None:
        return {}
    found = [pair for part in parts for pair in part]
    ids = np.concatenate([pair[0] for pair in found])
    assert len(ids) == len(split) == len(np.unique(ids)), "every sample is counted once"
    return split.score(np.concatenate([pair[1] for pair in found])[np.argsort(ids)])


def _predict(
    stack: LayerStack, split: Split, global_ids: np.ndarray, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and predictions of this rank's rows; all ranks run the model as often."""
    num_tokens = padded_length(split, global_ids)
    own = replica_batch(global_ids, dist.get_rank(), dist.get_world_size(), 1)
    inputs = split.inputs(own.ids.tolist(), num_tokens)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    num_own = int(own.weights.sum())  # in front, padding behind them
    outputs = stack(inputs, **split.context(own.ids.tolist(), num_tokens))[:num_own]
    ids = own.ids[:num_own]
    predicted = split.predict(outputs, ids.tolist(), num_tokens)
    return ids, predicted.cpu().numpy()

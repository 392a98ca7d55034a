"""One optimizer step, twice: as written by hand with DistributedDataParallel, and by the elastic runtime."""

from abc import ABC, abstractmethod
from itertools import count

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments.ranks import SEED, TIMEOUT_S
from experiments.step_time.cases import TASK
from pipetransformer.autodp.sampler import batch_ids, epoch_order, num_batches
from pipetransformer.autopipe.plan import Plan
from pipetransformer.data.base import Split
from pipetransformer.data.tasks import Task
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import AdamW
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.runtime.result import StepResult
from pipetransformer.training.loader import BatchLoader, ComingBatch

OPTIMIZER = AdamW(lr=1e-4, weight_decay=0.01, schedule="constant", clip_norm=1.0)


def make_runtime(stack: LayerStack, task: Task = TASK) -> ElasticRuntime:
    """Makes the runtime of this rank, for benchmarks of its parts under plans that a trainer would not choose."""
    context = RankContext.create(torch.device("cpu"), PRECISIONS["float32"], TIMEOUT_S)
    return ElasticRuntime(stack, task, OPTIMIZER, context)


class Loop(ABC):
    """Trains step by step on whole global batches; every rank makes the same calls.

    Args:
        batch_size: Over all ranks.
    """

    def __init__(self, stack: LayerStack, split: Split, batch_size: int) -> None:
        self._stack, self._split, self._batch_size = stack, split, batch_size
        self._num_batches = num_batches(len(split), batch_size) - 1  # leaves out the smaller last one
        self._order = epoch_order(len(split), 0, SEED)
        self._step = 0

    def step(self) -> None:
        self._train(self._batch(self._step), OPTIMIZER.rate(self._step, num_steps=1))
        self._step += 1

    def _batch(self, step: int) -> np.ndarray:
        """Returns the samples of a step."""
        return batch_ids(self._order, step % self._num_batches, self._batch_size)

    @abstractmethod
    def loss(self) -> float:
        """Returns the last step's loss, of this rank or of the global batch."""

    @abstractmethod
    def _train(self, ids: np.ndarray, rate: float) -> None: ...


class PlainLoop(Loop):
    """The loop that one writes by hand."""

    def __init__(self, stack: LayerStack, split: Split, batch_size: int) -> None:
        super().__init__(stack, split, batch_size)
        self._model = DistributedDataParallel(stack.train(), gradient_as_bucket_view=True)
        optimizer = OPTIMIZER.build(stack.parameters())
        assert optimizer is not None
        assert OPTIMIZER.clip_norm is not None
        self._optimizer, self._clip_norm = optimizer, OPTIMIZER.clip_norm
        self._loss = 0.0

    def loss(self) -> float:
        return self._loss

    def _train(self, ids: np.ndarray, rate: float) -> None:
        own = np.array_split(ids, dist.get_world_size())[dist.get_rank()].tolist()
        output = self._model(self._split.inputs(own, None), **self._split.context(own, None))
        loss = nn.functional.cross_entropy(output, self._split.targets(own))
        loss.backward()
        nn.utils.clip_grad_norm_(self._stack.parameters(), self._clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._loss = loss.item()


class ElasticLoop(Loop):
    """The runtime, at first under the plan that plain data parallelism is: one stage, a replica on each rank.

    Attributes:
        loader: What its batches come from.
        runtime: What trains on them; it may go to another plan between two steps.
    """

    def __init__(
        self, stack: LayerStack, split: Split, batch_size: int, loader: BatchLoader | None = None, task: Task = TASK
    ) -> None:
        super().__init__(stack, split, batch_size)
        self.loader = loader or BatchLoader.uncached(split, stack.hidden_shape, SEED)
        self.runtime = make_runtime(stack, task)
        self._last: StepResult | None = None
        self.runtime.apply_plan(Plan(0, 0, ((0, len(stack) - 1),), dist.get_world_size(), num_microbatches=1))

    def loss(self) -> float:
        assert self._last is not None
        return self._last.loss

    def read_ahead(self) -> None:
        """Prefetches from here on, as the trainer does."""
        assert self.runtime.topology is not None
        self.loader.prefetch((ComingBatch(self._batch(step)) for step in count(self._step)), self.runtime.topology)

    def close(self) -> None:
        self.runtime.close()

    def _train(self, ids: np.ndarray, rate: float) -> None:
        before, self._last = self._last, self.runtime.train_step(self.loader, ids, self._step, rate)
        if before is not None:
            _ = before.loss  # one step late, as the trainer asks for it

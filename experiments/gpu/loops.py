"""One optimizer step on one device: as a script has it for the original model, and by the runtime."""

from abc import ABC, abstractmethod
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from experiments.gpu.cases import NUM_BATCHES, SEED, Case, frozen_parts
from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autocache.capacity import CacheCapacity, FeatureFormat
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autodp.sampler import SampleOrder
from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan, layer_above
from pipetransformer.data.base import Split
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import AdamW
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.runtime.result import StepResult
from pipetransformer.training.cache_session import CacheSession, CacheTerms
from pipetransformer.training.cache_setup import WorldCommunicator
from pipetransformer.training.loader import BatchLoader, ComingBatch, sample_source

RATE, DECAY, CLIP_NORM, TIMEOUT_S = 1e-4, 0.01, 1.0, 600.0
OPTIMIZER = AdamW(lr=RATE, weight_decay=DECAY, schedule="constant", clip_norm=CLIP_NORM)
MUCH = 2**40


class Loop(ABC):
    """Trains on the same few batches again and again."""

    _num_steps = 0

    def step(self) -> None:
        """Takes an optimizer step on the next batch."""
        self._train(self._num_steps % NUM_BATCHES)
        self._num_steps += 1

    @abstractmethod
    def _train(self, index: int) -> None: ...

    @abstractmethod
    def loss(self) -> float:
        """Returns the loss of the last step."""

    def close(self) -> None:  # noqa: B027 - one has nothing to close
        """Gives back what the loop holds."""


class PlainLoop(Loop):
    """A script's own step: the original model, autocast, fused AdamW where there is a GPU, clipping.

    Args:
        num_frozen: Blocks, with the embedding, whose weights take no gradient.
    """

    def __init__(
        self, case: Case, folder: Path, device: torch.device, precision: str, num_frozen: int, compiles: bool
    ) -> None:  # fmt: skip
        stack, split = case.stack(folder), case.split()
        model = case.original(stack).train().to(device)
        weights, blocks = frozen_parts(stack, model, num_frozen)
        for weight in weights:
            weight.requires_grad_(False)
        for block in blocks:
            block.eval()
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self._model = torch.compile(model) if compiles else model
        self._optimizer = self._adamw(device)
        self._autocast_type, self._device = PRECISIONS[precision].compute_dtype, device
        size = case.batch_size
        ids = [range(index * size, (index + 1) * size) for index in range(NUM_BATCHES)]
        self._batches = [(split.inputs(own, None).to(device), split.targets(own).to(device)) for own in ids]
        masks = (split.context(own, None) for own in ids)
        self._contexts = [{name: each.to(device) for name, each in mask.items()} for mask in masks]
        self._loss = torch.zeros(())

    def _adamw(self, device: torch.device) -> torch.optim.Optimizer:
        groups = [
            {"params": [each for each in self._trained if (each.ndim > 1) == decays], "weight_decay": DECAY * decays}
            for decays in (True, False)
        ]
        return torch.optim.AdamW(groups, lr=RATE, fused=device.type == "cuda" or None)

    def _train(self, index: int) -> None:
        (inputs, targets), context = self._batches[index], self._contexts[index]
        with torch.autocast(self._device.type, self._autocast_type, enabled=self._autocast_type is not None):
            output = self._model(inputs, **context)
            logits: Tensor = output if isinstance(output, Tensor) else output.logits
            loss = nn.functional.cross_entropy(logits, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self._trained, CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._loss = loss.detach()

    def loss(self) -> float:
        return self._loss.item()


class ElasticLoop(Loop):
    """The runtime under a plan of one stage on one device.

    Args:
        num_frozen: The frozen prefix.
        cached: Its output is read from the cache, through shared memory; otherwise batches lie on the device, as those
            of the plain loop do.
    """

    def __init__(
        self, case: Case, folder: Path, device: torch.device, precision: str, num_frozen: int, compiles: bool,
        cached: bool = False,
    ) -> None:  # fmt: skip
        self._closing, stack = ExitStack(), case.stack(folder)
        dtype = PRECISIONS[precision].param_dtype
        context = RankContext.create(device, PRECISIONS[precision], TIMEOUT_S, case.randomness, compiles)
        self.runtime = self._closing.enter_context(ElasticRuntime(stack, case.task, OPTIMIZER, context))
        last, level = len(stack) - 1, num_frozen if cached else 0
        self._plan = Plan(num_frozen, level, ((layer_above(level), last),), num_replicas=1, num_microbatches=1)
        split = case.split()
        size = case.batch_size
        self._ids = [np.arange(index * size, (index + 1) * size) for index in range(NUM_BATCHES)]
        self._last: StepResult | None = None
        self._loader = BatchLoader.uncached(split, stack.hidden_shape, SEED)
        if cached:
            self._session = self._fill(stack, split, dtype, folder, num_frozen)
        self.runtime.apply_plan(self._plan)
        self._batches: list[Batch] = []
        if cached:
            self._session.start_reading(level)
            self._session.prefetch(map(ComingBatch, cycle(self._ids)))
        else:
            topology, on_host = Topology(self._plan, 0), case.randomness == "device"
            batches = (self._loader.batch(own, topology, index) for index, own in enumerate(self._ids))
            self._batches = [each.to(device, dtype, on_host) for each in batches]

    def _fill(self, stack: LayerStack, split: Split, dtype: torch.dtype, folder: Path, level: int) -> CacheSession:
        """Stores the output of a frozen prefix, of which the loader then reads."""
        source = sample_source(split, stack.hidden_shape)
        feature_format = FeatureFormat(source.hidden_size, dtype)
        whole = CacheCapacity([source], feature_format, Budgets(MUCH, 0), persistent=False).whole_bytes
        capacity = CacheCapacity([source], feature_format, Budgets(whole, 0), persistent=False)
        cache = AutoCache(capacity, {source.name: folder}, WorldCommunicator())
        self._closing.callback(cache.close)
        self._loader, size = BatchLoader(split, source, SEED, cache.reader), len(self._ids[0])
        timeline, order = Timeline(len(split), size, NUM_BATCHES, 10**6, 10**6), SampleOrder(len(split), SEED, size)
        terms = CacheTerms(folder)
        session = CacheSession(cache, self._loader, (), self.runtime, Reporter(), timeline, order, terms)
        self._closing.callback(session.release)
        self.runtime.apply_plan(Plan(level, 0, ((0, len(stack) - 1),), num_replicas=1, num_microbatches=1))
        assert session.advance_to(level, step=0), "the cache has room for all"
        return session

    def _train(self, index: int) -> None:
        before = self._last
        if self._batches:
            self._last = self.runtime.step(self._batches[index], RATE)
        else:
            self._last = self.runtime.train_step(self._loader, self._ids[index], index, RATE)
        if before is not None:
            _ = before.loss  # one step late, as the trainer reads it

    def loss(self) -> float:
        assert self._last is not None
        return self._last.loss

    def close(self) -> None:
        self._closing.close()

"""One rank's model whose frozen prefix is cached in several ways, in turn."""

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch.distributed as dist

from experiments.ranks import SEED
from experiments.step_time.cases import Case, write_bert
from experiments.step_time.loops import make_runtime
from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autocache.capacity import CacheCapacity, FeatureFormat
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autodp.sampler import SampleOrder, batch_ids, epoch_order
from pipetransformer.autopipe.plan import Plan, layer_above
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.cache_session import CacheSession, CacheTerms
from pipetransformer.training.cache_setup import WorldCommunicator
from pipetransformer.training.loader import BatchLoader, sample_source

FLOAT32, MUCH = PRECISIONS["float32"], 2**40


@dataclass(frozen=True)
class Variant:
    """A way of caching.

    Attributes:
        cache: ``None`` computes the frozen prefix in every step.
    """

    name: str
    plan: Plan
    loader: BatchLoader
    cache: AutoCache | None
    cache_session: CacheSession


class Bench:
    """One rank's model and split. Every rank makes the same calls.

    Args:
        closing: Receives what has to be closed.
    """

    def __init__(self, case: Case, closing: ExitStack) -> None:
        folders = [closing.enter_context(TemporaryDirectory())]
        self._bert = Path(folders[0])
        write_bert(self._bert)
        dist.broadcast_object_list(folders)
        closing.callback(dist.barrier)  # the caches lie in the folder of rank 0
        self._shared, self._closing = Path(folders[0]), closing
        self.case, self.stack, self.split = case, case.stack(self._bert), case.split()
        self.source = sample_source(self.split, self.stack.hidden_shape)
        self.runtime = closing.enter_context(make_runtime(self.stack))
        gc.freeze()  # as runs do
        self.timeline = Timeline(len(self.split), case.batch_size, len(self.split) // case.batch_size, 10**6, 10**6)

    def plan(self, num_frozen: int, cache_level: int) -> Plan:
        """Returns a data-parallel plan on all ranks."""
        last = len(self.stack) - 1
        return Plan(num_frozen, cache_level, ((layer_above(cache_level), last),), dist.get_world_size(), 1)

    def cache(
        self, name: str, memory: float, disk: float, communicator: WorldCommunicator | None = None
    ) -> AutoCache:  # fmt: skip
        """Makes a cache of the split and opens it.

        Args:
            name: Folder of its files.
            memory, disk: Budgets, as fractions of what all samples take.
            communicator: All ranks by default.
        """
        feature_format = FeatureFormat(self.source.hidden_size, FLOAT32.param_dtype)
        whole = CacheCapacity([self.source], feature_format, Budgets(MUCH, 0), persistent=False).whole_bytes
        budgets = Budgets(int(memory * whole), int(disk * whole))
        capacity = CacheCapacity([self.source], feature_format, budgets, persistent=False)
        cache = AutoCache(capacity, {self.source.name: self._shared / name}, communicator or WorldCommunicator())
        self._closing.callback(cache.close)
        cache.open()
        return cache

    def variant(self, name: str, num_frozen: int, budgets: tuple[float, float] | None) -> Variant:
        """Caches the frozen prefix with these fractions of all features in memory and on disk, or not at all."""
        cache = None if budgets is None else self.cache(name, *budgets)
        loader = BatchLoader(self.split, self.source, SEED, None if cache is None else cache.reader)
        order = SampleOrder(len(self.split), SEED, self.case.batch_size)
        terms = CacheTerms(self._shared)
        cache_session = CacheSession(cache, loader, (), self.runtime, Reporter(), self.timeline, order, terms)
        plan = self.plan(num_frozen, 0 if cache is None else num_frozen)
        self.runtime.apply_plan(self.plan(num_frozen, 0))
        cache_session.advance_to(plan.cache_level, step=0)
        return Variant(name, plan, loader, cache, cache_session)

    def step(self, variant: Variant, ids: np.ndarray) -> None:
        """Trains on a global batch, under the variant's plan."""
        _ = self.runtime.train_step(variant.loader, ids, step=0, rate=1e-4).loss

    def batches(self, epoch: int) -> Sequence[np.ndarray]:
        """Returns the whole global batches of an epoch."""
        order = epoch_order(len(self.split), epoch, SEED)
        return [batch_ids(order, index, self.case.batch_size) for index in range(self.timeline.steps_per_epoch)]

"""One rank's model whose frozen prefix is cached in several ways, in turn."""

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist

from experiments.ranks import SEED, TIMEOUT_S
from experiments.step_time.cases import NUM_CLASSES, Case, write_bert
from experiments.step_time.loops import OPTIMIZER
from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autocache.room import Kind, Room
from pipetransformer.autodp.sampler import batch_ids, epoch_order
from pipetransformer.autopipe.plan import Plan, layer_above
from pipetransformer.data.base import CLASSIFICATION
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import Groups
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.caching import Caching
from pipetransformer.training.clock import Clock
from pipetransformer.training.feed import Feed
from pipetransformer.training.peers import WorldPeers
from pipetransformer.training.task import objective

FLOAT32, MUCH = PRECISIONS["float32"], 2**40


@dataclass(frozen=True)
class Variant:
    """A way of caching.

    Attributes:
        cache: ``None`` computes the frozen prefix in every step.
    """

    name: str
    plan: Plan
    feed: Feed
    cache: AutoCache | None
    caching: Caching


class Bench:
    """Every rank makes the same calls.

    Args:
        closing: Gives back what is opened.
    """

    def __init__(self, case: Case, closing: ExitStack) -> None:
        folders = [closing.enter_context(TemporaryDirectory())]
        self._bert = Path(folders[0])
        write_bert(self._bert)
        dist.broadcast_object_list(folders)
        closing.callback(dist.barrier)  # the caches lie in the folder of rank 0
        self._shared, self._closing = Path(folders[0]), closing
        self.case, self.stack, self.split = case, case.stack(self._bert), case.split()
        groups = Groups(TIMEOUT_S)
        closing.callback(groups.close)
        self.runtime = ElasticRuntime(
            self.stack, groups, objective(CLASSIFICATION, NUM_CLASSES), OPTIMIZER.build, OPTIMIZER.clip_norm,
            torch.device("cpu"), FLOAT32,
        )  # fmt: skip
        gc.freeze()  # as runs do
        self.clock = Clock(len(self.split), case.batch_size, len(self.split) // case.batch_size, 10**6, 10**6)

    def plan(self, num_frozen: int, cache_level: int) -> Plan:
        """Data parallel, on all ranks."""
        last = len(self.stack) - 1
        return Plan(num_frozen, cache_level, ((layer_above(cache_level), last),), dist.get_world_size(), 1)

    def feed(self) -> Feed:
        return Feed(self.split, self.stack.hidden_shape, SEED)

    def cache(
        self, feed: Feed, name: str, memory: float, disk: float, peers: WorldPeers | None = None
    ) -> AutoCache:  # fmt: skip
        """A cache with an open room.

        Args:
            memory, disk: Budgets, as shares of what all samples take.
        """
        kind = Kind(feed.hidden_size, FLOAT32.weights)
        whole = Room([feed.source], kind, Budgets(MUCH, 0), is_lasting=False).whole_bytes
        room = Room([feed.source], kind, Budgets(int(memory * whole), int(disk * whole)), is_lasting=False)
        cache = AutoCache(room, {feed.source.name: self._shared / name}, peers or WorldPeers())
        self._closing.callback(cache.close)
        assert cache.open() is None, "the machine has no room for the cache"
        feed.cache = cache
        return cache

    def variant(self, name: str, num_frozen: int, room: tuple[float, float] | None) -> Variant:
        """Caches the frozen prefix in a room of these shares of all features, or not at all."""
        feed = self.feed()
        cache = None if room is None else self.cache(feed, name, *room)
        caching = Caching(cache, feed, (), self.runtime, Reporter(), self.clock, SEED)
        plan = self.plan(num_frozen, 0 if cache is None else num_frozen)
        self.runtime.apply(self.plan(num_frozen, 0))
        caching.go(plan.cache_level, step=0)
        return Variant(name, plan, feed, cache, caching)

    def step(self, variant: Variant, ids: np.ndarray) -> None:
        """Trains on a global batch, under the variant's plan."""
        assert self.runtime.engine is not None
        batch, _ = variant.feed.batch(ids, variant.plan, self.runtime.engine.position)
        _ = self.runtime.step(batch, rate=1e-4).loss

    def batches(self, epoch: int) -> Sequence[np.ndarray]:
        """The whole global batches of an epoch."""
        order = epoch_order(len(self.split), epoch, SEED)
        return [batch_ids(order, index, self.case.batch_size) for index in range(self.clock.steps_per_epoch)]

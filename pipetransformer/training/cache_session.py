"""Cache handling of the training loop: fill, prefetch, recompute misses."""

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipetransformer.autocache.bandwidth import passes_to_pay_back
from pipetransformer.autocache.cache import AutoCache, Filled
from pipetransformer.autocache.reader import ReadStats
from pipetransformer.autodp.sampler import SampleOrder
from pipetransformer.autopipe.limit import fill_seconds
from pipetransformer.autopipe.plan import layer_above
from pipetransformer.config.names import in_options
from pipetransformer.errors import FillFailed, StoreFailed, StoreInUse
from pipetransformer.planning.cache_rule import refused
from pipetransformer.planning.planner import Planner
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.training.interrupt import is_requested
from pipetransformer.training.loader import BatchLoader, ComingBatch
from pipetransformer.training.position import inside


@dataclass(frozen=True)
class CacheTerms:
    """Terms on which a run uses its cache.

    Attributes:
        run_dir: Folder of stores that end with the run.
        shares: The frozen prefix stays, so that other runs may read a persistent store once it is filled.
        required: The run ends where frozen layers' output is not read from the cache.
        planner: Predicts the time of a fill.
    """

    run_dir: Path
    shares: bool = False
    required: bool = False
    planner: Planner | None = None


class CacheSession:
    """One rank's use of the cache during a run. Without a cache, or once it is off, nothing happens.

    Args:
        cache: Stores the frozen layers' output; ``None`` for a run without a cache.
        train: Loads the training split.
        evaluation: Load the evaluation splits.
        runtime: Runs the frozen layers.
        report: Receives fills and warnings.
        timeline: Tells which samples are still to come.
        order: Of the training samples.
        terms: What the run asks of it.
    """

    def __init__(
        self, cache: AutoCache | None, train: BatchLoader, evaluation: tuple[BatchLoader, ...], runtime: ElasticRuntime,
        report: Reporter, timeline: Timeline, order: SampleOrder, terms: CacheTerms,
    ) -> None:  # fmt: skip
        self._cache, self._train, self._evaluation = cache, train, evaluation
        self._runtime, self._report, self._timeline, self._order = runtime, report, timeline, order
        if cache is not None:
            cache.reader.device = runtime.device
        self._stats = ReadStats() if cache is None else cache.reader.stats  # outlives a cache that is turned off
        self._terms = terms
        self._stored: dict[str, Any] = {}  # figures of the fills so far
        self._fill_s = 0.0  # of all fills that the log tells of, those before a stop too
        self._borrowed = ExitStack()  # frozen layers, for misses

    @property
    def is_on(self) -> bool:
        """True as long as frozen layers' output can be stored and read."""
        return self._cache is not None

    @property
    def is_required(self) -> bool:
        """True where the run ends if frozen layers' output is not read from the cache."""
        return self._terms.required

    def num_samples(self, step: int) -> int:
        """Returns the number of training samples that this run has to get back from a fill.

        None where later runs read what is stored: that is what it is stored for, and it may be there already.
        """
        if self._cache is None:
            return self._timeline.samples_left(step)
        if self._terms.shares and self._cache.capacity.persistent:
            return 0
        if self._terms.planner is None:
            miss_rate = self._cache.capacity.miss_rate(self._train.source.name)
        else:
            miss_rate = self._terms.planner.profile.cache_miss_rate  # of rank 0's node, so that all ranks plan alike
        num_draws = 1 if self._reads_each_once(step) else len(self._draws_left(step))
        return round(self._timeline.samples_left(step) * num_draws * (1 - miss_rate))

    def advance_to(self, level: int, step: int) -> bool:
        """Brings the cache to a level, for the samples that the rest of the run reads. Collective.

        Returns:
            True if it is at that level. Otherwise the cache is off from here on, on all ranks.

        Raises:
            UserError: It cannot be brought there, and the run requires it.
        """
        self.release()
        if self._cache is None:
            return True
        if level < self._cache.level:
            self._cache.clear()  # blocks below its level are unfrozen and change
        if level == self._cache.level:
            return True
        with inside("the filling of the cache", step):
            problem = self._open_and_fill(self._cache, level, step)
        if problem is not None:
            message = f"the cache is off from here on: {problem}"
            self._refuse_without(message)
            self._report.write("warning", message=message)
            self._cache.close()
            self._cache = None
        return problem is None

    def _open_and_fill(self, cache: AutoCache, level: int, step: int) -> str | None:
        """Returns why it failed, or ``None``. Beside a store that others read it keeps its own."""
        try:
            problem = self._open(cache) or self._fill(cache, level, step)
        except StoreInUse as error:
            message = f"the cache is kept for this run only: {in_options(error)}"
            self._refuse_without(message)
            self._report.write("warning", message=message)
            cache.keep_for_this_run(self._terms.run_dir)
            problem = self._open(cache) or self._fill(cache, level, step)
        if problem is None and self._terms.shares and cache.capacity.persistent:
            problem = cache.share()
            problem = None if problem is None else in_options(problem)
        return problem

    def _refuse_without(self, message: str) -> None:
        if self._terms.required:
            raise refused(message)

    def _open(self, cache: AutoCache) -> str | None:
        """Returns why it failed, or ``None``."""
        try:
            opened = cache.open()
        except StoreFailed as error:
            return in_options(error)
        if opened.num_damaged:
            damaged = f"{opened.num_damaged} stored samples were damaged and are computed again"
            self._report.write("warning", message=f"the cache: {damaged}")
        return None

    def _fill(self, cache: AutoCache, level: int, step: int) -> str | None:
        """Returns why it failed, or ``None``."""
        start, from_level = time.perf_counter(), cache.level
        wanted = [(self._train.source, self._remaining(step))]
        wanted += [(loader.source, np.arange(len(loader.source.lengths))) for loader in self._evaluation]
        first = layer_above(from_level)
        with self._runtime.frozen_forward(first, level) as compute:
            layers = (self._runtime.layer_state(layer) for layer in range(first, level + 1))
            try:
                filled = cache.advance(
                    level,
                    wanted,
                    compute,
                    layers if cache.capacity.persistent else None,
                    is_requested,
                    lambda coming: self._report_plan(cache, coming, level, step),
                )
            except (FillFailed, StoreFailed) as error:
                return in_options(error)
        self._report_fill(cache, filled, from_level, step, time.perf_counter() - start)
        return None

    def _report_plan(self, cache: AutoCache, coming: Filled, level: int, step: int) -> None:
        """Reports what a fill is about to take, and after how many passes over the samples it has paid back."""
        planner = self._terms.planner
        if planner is None or not coming.num_computed:
            return
        profile, bytes_by_tier = planner.without_overhead(), cache.capacity.bytes_by_tier
        missing = coming.num_computed / (coming.num_computed + coming.num_found)
        self._report.write(
            "cache_plan",
            step=step,
            from_level=cache.level,
            to_level=level,
            num_samples=coming.num_computed,
            num_found=coming.num_found,
            bytes_by_tier=bytes_by_tier,
            folder=str(cache.folder) if "disk" in bytes_by_tier else None,
            outlives_run=cache.capacity.persistent,
            seconds=fill_seconds(profile, cache.level, level, coming.num_computed) / planner.cluster.num_devices,
            passes=passes_to_pay_back(profile, cache.level, level, missing),
        )

    def _report_fill(self, cache: AutoCache, filled: Filled, from_level: int, step: int, seconds: float) -> None:
        bytes_by_tier = cache.capacity.bytes_by_tier
        self._fill_s += seconds
        self._stored = {"bytes_by_tier": bytes_by_tier, "fill_seconds": self._fill_s}
        if filled.num_replaced:
            changed = f" ({', '.join(cache.changed)})" if cache.changed else ""
            others = f"{filled.num_replaced} stored samples were of other weights or another level{changed}"
            self._report.write("warning", message=f"the cache: {others}, and these take their place")
        self._report.write(
            "cache_fill",
            step=step,
            from_level=from_level,
            to_level=cache.level,
            num_samples=filled.num_computed,
            num_found=filled.num_found,
            seconds=seconds,
            bytes=sum(bytes_by_tier.values()),
            bytes_by_tier=bytes_by_tier,
        )

    def _remaining(self, step: int) -> np.ndarray:
        """Returns the cache's numbers of training samples that are still read, ascending; fewer in the last epoch.

        Of several draws they are those that epochs left may read, unless a later run reads the others.
        """
        source, ids, last = self._train.source, np.arange(self._timeline.num_samples), self._timeline.num_epochs - 1
        if self._reads_each_once(step):
            return np.sort(source.numbers(self._order.epoch(last)[self._timeline.samples_read(step) :], last))
        return np.concatenate([ids + draw * len(ids) for draw in self._draws_left(step)])

    def _reads_each_once(self, step: int) -> bool:
        """Returns whether one draw of each sample is all that is still read: in the last epoch."""
        is_last = len(self._timeline.epochs_left(step)) == 1
        return self._timeline.samples_read(step) > 0 or (is_last and not self._is_kept)

    @property
    def _is_kept(self) -> bool:
        """True where a later run may read what is stored."""
        return self._cache is not None and self._cache.capacity.persistent

    def _draws_left(self, step: int) -> list[int]:
        """Returns the draws that are filled; all where each sample has its own, which would take long to draw."""
        source = self._train.source
        if source.num_draws == 1 or source.draws is not None or self._is_kept:
            return list(range(source.num_draws))
        return sorted({epoch % source.num_draws for epoch in self._timeline.epochs_left(step)})

    def start_reading(self, level: int) -> None:
        """Reads a stored level from here on. Collective where samples have to be recomputed."""
        if self._cache is None or level == 0:
            return
        compute = None
        if self._cache.capacity.is_partial:
            compute = self._borrowed.enter_context(self._runtime.frozen_forward(0, level))
        self._cache.start_reading(compute)

    def prefetch(self, batches: Iterable[ComingBatch]) -> None:
        """Announces the global training batches that come, in their order, which are read ahead, cached or not."""
        if self._runtime.topology is not None:
            self._train.prefetch(batches, self._runtime.topology)

    def release(self) -> None:
        """Releases borrowed frozen layers and stops prefetching. Not a collective."""
        self._borrowed.close()
        if self._cache is not None:
            self._cache.reader.stop_prefetching()

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank's steps waited for the cache so far."""
        return self._stats.waited_s

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`figures` counts."""
        return {"stored": self._stored, "reads": asdict(self._stats)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values of :meth:`state_dict`, before the first fill."""
        self._stored, self._fill_s = state["stored"], state["stored"].get("fill_seconds", 0.0)
        for name, value in state["reads"].items():
            setattr(self._stats, name, value)

    def figures(self) -> dict[str, Any]:
        """Returns this rank's reads and its node's stores for the summary; empty if nothing was stored."""
        if not self._stored:
            return {}
        total = self._stats.hits + self._stats.misses
        return {
            "hit_rate": self._stats.hits / total if total else None,
            **self._stored,
            "read_seconds": self._stats.read_s,
            "wait_seconds": self._stats.waited_s,
            "recompute_seconds": self._stats.compute_s,
        }

"""What the loop does about frozen layers' output: fills the cache, reads it ahead, computes what it has no room for."""

import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np

from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autodp.sampler import epoch_order
from pipetransformer.autopipe.plan import layer_above
from pipetransformer.config.names import in_options
from pipetransformer.errors import FillFailed
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.training.loader import BatchLoader


class CacheSession:
    """One rank's part in the cache of a run; without a cache nothing happens.

    Args:
        cache: Where frozen features go; ``None`` computes them.
        train, evaluation: The splits that are read.
        seed: Of the order of the samples.
    """

    def __init__(
        self, cache: AutoCache | None, train: BatchLoader, evaluation: tuple[BatchLoader, ...], runtime: ElasticRuntime,
        report: Reporter, timeline: Timeline, seed: int,
    ) -> None:  # fmt: skip
        self._cache, self._train, self._evaluation = cache, train, evaluation
        self._used = cache  # also when it is off
        self._runtime, self._report, self._timeline, self._seed = runtime, report, timeline, seed
        self._lent = ExitStack()  # frozen layers, while they have to be computed

    @property
    def is_on(self) -> bool:
        return self._cache is not None

    def num_samples(self, step: int) -> int:
        """Training samples that a fill computes."""
        if self._cache is None:
            return self._timeline.samples_left(step)
        return round(len(self._samples_to_come(step)) * (1 - self._cache.capacity.missing(self._train.source.name)))

    def go(self, level: int, step: int) -> bool:
        """Brings the cache to a level, for the samples that the rest of the run reads.

        Returns:
            Whether it is there. If not, the cache is off from here on, on all ranks.
        """
        self.release()
        if self._cache is None:
            return True
        if level < self._cache.level:
            self._cache.clear()  # blocks below its level thaw and change
        if level == self._cache.level:
            return True
        problem = self._open(self._cache) or self._fill(self._cache, level, step)
        if problem is not None:
            self._report.write("warning", message=f"the cache is off from here on: {problem}")
            self._cache.close()
            self._cache = None
        return problem is None

    def _open(self, cache: AutoCache) -> str | None:
        """What stands against it."""
        problem = cache.open()
        if problem is not None:
            return in_options(problem)
        if cache.num_dropped:
            damaged = f"{cache.num_dropped} stored samples were damaged and are computed again"
            self._report.write("warning", message=f"the cache: {damaged}")
            cache.num_dropped = 0
        return None

    def _fill(self, cache: AutoCache, level: int, step: int) -> str | None:
        """What stood against it."""
        start, from_level = time.perf_counter(), cache.level
        wanted = [(self._train.source, self._samples_to_come(step))]
        wanted += [(loader.source, np.arange(len(loader.split))) for loader in self._evaluation]
        first = layer_above(from_level)
        with self._runtime.frozen_forward(first, level) as compute:
            layers = (self._runtime.layer_state(layer) for layer in range(first, level + 1))
            try:
                filled = cache.advance(level, wanted, compute, layers if cache.capacity.persistent else None)
            except FillFailed as error:
                return in_options(error)
        if cache.num_kept and not filled.num_found:
            others = f"{cache.num_kept} stored samples were of other weights or another level"
            self._report.write("warning", message=f"the cache: {others}, and these take their place")
        cache.num_kept = 0
        self._report.write(
            "cache_fill",
            step=step,
            from_level=from_level,
            to_level=level,
            num_samples=filled.num_computed,
            num_found=filled.num_found,
            seconds=time.perf_counter() - start,
            bytes=sum(cache.capacity.bytes_by_tier.values()),
            bytes_by_tier=cache.capacity.bytes_by_tier,
        )
        return None

    def _samples_to_come(self, step: int) -> np.ndarray:
        """Training samples that are still read, as the cache numbers them; in the last epoch those that are left."""
        num_read = self._timeline.samples_read(step)
        if num_read == 0:
            return np.arange(len(self._train.source.lengths))
        last = self._timeline.num_epochs - 1
        order = epoch_order(self._timeline.num_samples, last, self._seed)
        return self._train.drawn(np.sort(order[num_read:]), last)

    def serve(self, level: int) -> None:
        """Reads a stored level from here on."""
        if self._cache is None or level == 0:
            return
        compute = None
        if self._cache.capacity.is_partial:
            compute = self._lent.enter_context(self._runtime.frozen_forward(0, level))
        self._cache.serve(compute)

    def read_ahead(self, batches: Iterable[np.ndarray]) -> None:
        """Tells the order of the training samples from here on."""
        if self._cache is not None and self._runtime.topology is not None:
            self._train.prefetch(batches, self._runtime.topology)

    def release(self) -> None:
        """Gives back the frozen layers that were kept at hand, and ends reading ahead; other ranks need not come."""
        self._lent.close()
        if self._cache is not None:
            self._cache.stop_reading()

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank's steps waited for the cache so far."""
        return 0.0 if self._used is None else self._used.reads.waited_s

    def figures(self) -> dict[str, Any]:
        """Of this rank's reads and its node's stores, for the summary; empty where nothing was stored."""
        if self._used is None or self._used.fill_s == 0:
            return {}
        reads = self._used.reads
        total = reads.hits + reads.misses
        return {
            "hit_rate": reads.hits / total if total else None,
            "bytes_by_tier": self._used.capacity.bytes_by_tier,
            "fill_seconds": self._used.fill_s,
            "read_seconds": reads.read_s,
            "wait_seconds": reads.waited_s,
            "recompute_seconds": reads.compute_s,
        }

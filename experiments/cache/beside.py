"""Filling the cache beside training, whose steps compute the frozen blocks until it is full: does that pay?"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from threading import Thread

import numpy as np
import torch.distributed as dist

from experiments.cache.bench import Bench, Variant
from experiments.record import spread
from experiments.step_time.cases import Case
from pipetransformer.autopipe.plan import layer_above
from pipetransformer.training.cache_setup import WorldCommunicator
from pipetransformer.training.loader import ComingBatch

NUM_STEPS = 4  # which take about as long as the fill
HEADER = (
    "model", "fill, s", "steps with the cache, s", "fill beside as many steps without, s", "ratio, median",
    "least and most",
)  # fmt: skip


@dataclass(frozen=True)
class Beside:
    """Seconds of a fill, of some steps that read the cache, and of the fill beside steps that do not; of each round."""

    case: str
    fill_s: tuple[float, ...]
    cached_s: tuple[float, ...]
    beside_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Time of filling beside training over that of filling first."""
        return [
            own / (fill + cached) for fill, cached, own in zip(self.fill_s, self.cached_s, self.beside_s, strict=True)
        ]

    def row(self) -> tuple[str, ...]:
        seconds = (f"{median(own):.3f}" for own in (self.fill_s, self.cached_s, self.beside_s))
        return (self.case, *seconds, *spread(self.ratios))


class Unmet(WorldCommunicator):
    """Enters no collective: the training thread does, and two threads would interleave theirs."""

    def all_reduce_sum(self, *numbers: int) -> tuple[int, ...]:
        return numbers


def measure_beside(cases: tuple[Case, ...], num_rounds: int) -> list[Beside]:
    """Fills a cache in memory with the lower half of the blocks, in both ways in every round."""
    return [_measure(case, num_rounds) for case in cases]


def _measure(case: Case, num_rounds: int) -> Beside:
    with ExitStack() as closing:
        ways = Ways(Bench(case, closing))
        rounds = [ways.turn() for _ in range(num_rounds + 1)][1:]  # the first one warms up
        fill_s, cached_s, beside_s = zip(*rounds, strict=True)
        return Beside(case.name, fill_s, cached_s, beside_s)


class Ways:
    """One rank's two ways of filling."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._level = bench, bench.stack.num_blocks // 2
        self._cached = bench.variant("full", self._level, (1.0, 0.0))
        self._uncached = bench.variant("none", self._level, None)
        self._cache = bench.cache("filling", 1.0, 0.0, Unmet())

    def turn(self) -> tuple[float, float, float]:
        """Measures the seconds of the fill, of steps with the cache, and of the fill beside steps without."""
        fill_s = self._seconds(self._cached, self._fill)
        cached_s = self._seconds(self._cached, lambda: self._train(self._cached))
        return fill_s, cached_s, self._seconds(self._uncached, self._fill_beside)

    def _seconds(self, variant: Variant, work: Callable[[], None]) -> float:
        """Measures the seconds until all ranks are done."""
        self._bench.runtime.apply_plan(variant.plan)
        variant.cache_session.start_reading(variant.plan.cache_level)
        self._train(variant)  # what a new plan does for the first time is not what is compared
        self._cache.clear()
        with self._bench.runtime.frozen_forward(layer_above(0), self._level) as self._compute:
            dist.barrier()
            start = time.perf_counter()
            work()
            dist.barrier()
            return time.perf_counter() - start

    def _fill(self) -> None:
        source = self._bench.source
        self._cache.advance(self._level, [(source, np.arange(len(source.lengths)))], self._compute)

    def _fill_beside(self) -> None:
        filling = Thread(target=self._fill)
        filling.start()
        self._train(self._uncached)
        filling.join()

    def _train(self, variant: Variant) -> None:
        batches = self._bench.batches(epoch=0)[:NUM_STEPS]
        variant.cache_session.prefetch(map(ComingBatch, batches))
        for ids in batches:
            self._bench.step(variant, ids)
        variant.cache_session.release()

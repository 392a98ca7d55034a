"""Reads hidden behind training, and the time of a step with a cache, a smaller one, and none."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch.distributed as dist

from experiments.cache.bench import Bench, Variant
from experiments.step_time.cases import Case
from pipetransformer.training.loader import ComingBatch

WAITED, NUM_WARMUP_STEPS = 0.05, 2  # fraction of a step that may be spent waiting
BUDGETS = {"memory": (1.0, 0.0), "disk, ten times the memory": (0.1, 1.0), "half in memory, half computed": (0.5, 0.0)}
UNCACHED = "no cache, the same frozen"
HEADER = (
    "model", "cache", "hit rate", "steps that waited less than 5 %", "longest wait, share of its step",
    "reading hidden", "step, ms", "step / memory", "step / no cache",
)  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """Steps of one variant over all ranks, in the order of the rounds.

    Attributes:
        step_s: Seconds of each.
        waited_s: For how many of these it waited for the cache.
        read_s: Seconds of reading in all, hidden or not.
        round_s: The median step of each round.
    """

    case: str
    name: str
    step_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    read_s: float
    hits: int
    misses: int
    round_s: tuple[float, ...]

    @property
    def waits(self) -> np.ndarray:
        """Fraction of each step that was spent waiting."""
        return np.array(self.waited_s) / np.array(self.step_s)

    @property
    def unhindered(self) -> float:
        """Fraction of the steps that waited less than they may."""
        return float((self.waits < WAITED).mean())

    def ratio(self, other: "Steps") -> float:
        """Returns the median step time relative to another variant's, within a round."""
        return median(own / its for own, its in zip(self.round_s, other.round_s, strict=True))

    def row(self, memory: "Steps", uncached: "Steps") -> tuple[str, ...]:
        step = (f"{1000 * median(self.round_s):.1f}", f"{self.ratio(memory):.2f}", f"{self.ratio(uncached):.2f}")
        if self.name == UNCACHED:
            return (self.case, self.name, "", "", "", "", *step)
        return (
            self.case,
            self.name,
            f"{self.hits / (self.hits + self.misses):.0%}",
            f"{self.unhindered:.1%}",
            f"{self.waits.max():.1%}",
            f"{1 - sum(self.waited_s) / self.read_s:.1%}",
            *step,
        )


def measure_hidden(cases: tuple[Case, ...], num_rounds: int, num_steps: int | None) -> list[Steps]:
    """Trains under each variant in every round, for an epoch or so many steps."""
    return [steps for case in cases for steps in _measure(case, num_rounds, num_steps)]


def _measure(case: Case, num_rounds: int, num_steps: int | None) -> list[Steps]:
    with ExitStack() as closing:
        bench = Bench(case, closing)
        num_frozen = bench.stack.num_blocks // 2
        budgets = {**BUDGETS, UNCACHED: None}
        loops = [Loop(bench, bench.variant(name, num_frozen, own)) for name, own in budgets.items()]
        for number in range(num_rounds):
            for loop in loops if number % 2 else reversed(loops):
                loop.turn(number, num_steps)
        return [loop.steps() for loop in loops]


class Loop:
    """Training under one variant."""

    def __init__(self, bench: Bench, variant: Variant) -> None:
        self._bench, self._variant = bench, variant
        self._seconds: list[float] = []
        self._waited: list[float] = []
        self._rounds: list[float] = []
        self._read_s, self._hits, self._misses = 0.0, 0, 0

    def turn(self, epoch: int, num_steps: int | None) -> None:
        """Goes to the variant's plan and trains; its file is not in the page cache when the steps begin."""
        bench, own = self._bench, self._variant
        bench.runtime.apply_plan(own.plan)
        own.cache_session.start_reading(own.plan.cache_level)
        batches = bench.batches(epoch)[:num_steps]
        for ids in batches[:NUM_WARMUP_STEPS]:
            bench.step(own, ids)
        if own.cache is not None:
            own.cache.drop_page_cache()
        before = self._figures()
        dist.barrier()
        own.cache_session.prefetch(map(ComingBatch, batches))
        first = len(self._seconds)
        for ids in batches:
            waited_s, start = own.cache_session.waited_s, time.perf_counter()
            bench.step(own, ids)
            self._seconds.append(time.perf_counter() - start)
            self._waited.append(own.cache_session.waited_s - waited_s)
        own.cache_session.release()
        self._rounds.append(median(self._seconds[first:]))
        self._add(before, self._figures())

    def _figures(self) -> tuple[float, int, int]:
        if self._variant.cache is None:
            return 0.0, 0, 0
        stats = self._variant.cache.reader.stats
        return stats.read_s, stats.hits, stats.misses

    def _add(self, before: tuple[float, int, int], after: tuple[float, int, int]) -> None:
        self._read_s += after[0] - before[0]
        self._hits += after[1] - before[1]
        self._misses += after[2] - before[2]

    def steps(self) -> Steps:
        """Gathers the steps of all ranks; the medians of the rounds are rank 0's."""
        own = (self._seconds, self._waited, self._read_s, self._hits, self._misses)
        ranks = [own] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        seconds, waited = (tuple(value for rank in ranks for value in rank[index]) for index in (0, 1))
        read_s, hits, misses = (sum(rank[index] for rank in ranks) for index in (2, 3, 4))
        return Steps(
            self._bench.case.name, self._variant.name, seconds, waited, read_s, hits, misses, tuple(self._rounds)
        )  # fmt: skip


def rows(steps: list[Steps]) -> list[tuple[str, ...]]:
    """Returns a row per variant of a case, compared with two others of the case."""
    by_name = {(own.case, own.name): own for own in steps}
    memory = next(iter(BUDGETS))
    return [own.row(by_name[own.case, memory], by_name[own.case, UNCACHED]) for own in steps]

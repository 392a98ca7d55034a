"""Time of filling a level, compared with the forward pass of the newly frozen layers alone."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch.distributed as dist
from torch import Tensor

from experiments.cache.bench import Bench
from experiments.record import spread
from experiments.step_time.cases import Case
from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autocache.fill import TOKENS_AT_ONCE
from pipetransformer.autocache.source import Compute
from pipetransformer.autopipe.plan import layer_above

HEADER = (
    "model", "tier", "levels", "advance, s", "forward / processes, s", "ratio, median", "least and most",
    "ratio, forward in batches of training",
)  # fmt: skip
Part = tuple[Tensor, dict[str, Tensor]]  # inputs and context of some samples
Levels = tuple[int, int]
Seconds = dict[Levels, list[float]]
BUDGETS = {"memory": (1.0, 0.0), "disk": (0.0, 1.0)}


@dataclass(frozen=True)
class Advance:
    """Seconds of advancing from one level to another, one for each round.

    Attributes:
        advance_s: Of :meth:`AutoCache.advance` over all samples.
        forward_s: Of the newly frozen blocks over all samples, divided by the number of processes.
        batches_s: The same in batches as small as those of training.
    """

    case: str
    tier: str
    from_level: int
    to_level: int
    advance_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    batches_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Ratios to the forward pass in batches as large as those of a fill."""
        return [one / two for one, two in zip(self.advance_s, self.forward_s, strict=True)]

    @property
    def ratios_to_batches(self) -> list[float]:
        """Ratios to the forward pass in batches as small as those of training."""
        return [one / two for one, two in zip(self.advance_s, self.batches_s, strict=True)]

    def row(self) -> tuple[str, ...]:
        return (
            self.case,
            self.tier,
            f"{self.from_level} to {self.to_level}",
            f"{median(self.advance_s):.3f}",
            f"{median(self.forward_s):.3f}",
            *spread(self.ratios),
            f"{median(self.ratios_to_batches):.2f}",
        )


def measure_advancing(cases: tuple[Case, ...], num_rounds: int) -> list[Advance]:
    """Fills each tier to two levels in every round, and computes the same without storing."""
    return [advance for case in cases for advance in _measure(case, num_rounds)]


def _measure(case: Case, num_rounds: int) -> list[Advance]:
    with ExitStack() as closing:
        bench = Bench(case, closing)
        bench.runtime.apply_plan(bench.plan(0, 0))
        num_blocks = bench.stack.num_blocks
        levels = (0, num_blocks // 2), (num_blocks // 2, num_blocks - 1)
        fills = [Fill(bench, tier, bench.cache(tier, *budgets)) for tier, budgets in BUDGETS.items()]
        for number in range(-1, num_rounds):  # the first round warms up
            for fill in fills:
                fill.turn(levels, storing_first=bool(number % 2))
        return [
            Advance(case.name, fill.tier, *pair, *(tuple(own[pair][1:]) for own in fill.seconds))
            for fill in fills
            for pair in levels
        ]


class Fill:
    """One rank's part in filling one tier.

    Attributes:
        seconds: Of advancing, of the forward pass, and of that in batches of training, by the levels.
    """

    def __init__(self, bench: Bench, tier: str, cache: AutoCache) -> None:
        self._bench, self.tier, self._cache = bench, tier, cache
        self._source = bench.source
        self._num_tokens = int(self._source.lengths.max())
        self.seconds: tuple[Seconds, Seconds, Seconds] = ({}, {}, {})

    def turn(self, levels: tuple[tuple[int, int], ...], storing_first: bool) -> None:
        """Advances from level to level, and runs the same forward pass twice without storing."""
        self._cache.clear()
        advance_s, *forward_s = self.seconds
        sizes = TOKENS_AT_ONCE // self._num_tokens, self._bench.case.batch_size // dist.get_world_size()
        computed = [self._inputs(size) for size in sizes]
        for pair in levels:
            with self._bench.runtime.frozen_forward(layer_above(pair[0]), pair[1]) as compute:
                if storing_first:
                    self._advance(pair, compute, advance_s)
                computed = [
                    self._forward(pair, parts, compute, into) for parts, into in zip(computed, forward_s, strict=True)
                ]
                if not storing_first:
                    self._advance(pair, compute, advance_s)

    def _inputs(self, num_samples: int) -> list[Part]:
        """Reads this rank's part of the samples, in batches of at most so many."""
        num_tokens = self._num_tokens
        everything = np.arange(len(self._source.lengths))
        own = everything[dist.get_rank() :: dist.get_world_size()]
        parts = np.array_split(own, -(-len(own) // num_samples))
        return [(self._source.inputs(ids, num_tokens), self._source.context(ids, num_tokens)) for ids in parts]

    def _advance(self, pair: Levels, compute: Compute, into: Seconds) -> None:
        wanted = [(self._source, np.arange(len(self._source.lengths)))]
        with _timed(into.setdefault(pair, [])):
            self._cache.advance(pair[1], wanted, compute)

    def _forward(self, pair: Levels, parts: list[Part], compute: Compute, into: Seconds) -> list[Part]:
        seconds: list[float] = []
        with _timed(seconds):
            computed = [(compute(inputs, context), context) for inputs, context in parts]
        ranks = seconds * dist.get_world_size()
        dist.all_gather_object(ranks, seconds[0])
        into.setdefault(pair, []).append(sum(ranks) / len(ranks))
        return computed


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    """Appends the seconds of the block, which all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - start)

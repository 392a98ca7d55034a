"""Plans for the tiny models of :mod:`support.cases`."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pipetransformer.autopipe.plan import Plan, RankOrder
from support.cases import NUM_BLOCKS

HEAD = NUM_BLOCKS + 1


def plan(frozen: int, cached: int, ends: list[int], replicas: int, microbatches: int, schedule: str = "1f1b") -> Plan:
    """Stages that end with the given layers."""
    starts = [cached + 1 if cached else 0, *(end + 1 for end in ends[:-1])]
    return Plan(frozen, cached, tuple(zip(starts, ends, strict=True)), replicas, microbatches, schedule)


def sharded(frozen: int, cached: int, devices: int, microbatches: int, recompute: bool = False) -> Plan:
    """A share of every layer on every device."""
    stage = (cached + 1 if cached else 0, HEAD)
    return Plan(frozen, cached, (stage,), devices, microbatches, recompute=recompute, fsdp=True)


PIPE_TO_DATA = {  # 4 stages -> 2 -> 1, as the paper draws it
    0: plan(0, 0, [1, 3, 5, HEAD], 1, 4),
    2: plan(2, 2, [5, HEAD], 2, 2),
    4: plan(4, 4, [HEAD], 4, 1),
}


@dataclass(frozen=True)
class PlanShape:
    """A plan but for where its stages end.

    Attributes:
        arrangement: Devices of a pipeline, and replicas.
        num_microbatches: Not all schedules take every number.
    """

    arrangement: tuple[int, int]
    schedule: str
    num_microbatches: int
    num_frozen: int
    cached: bool
    recompute: bool
    rank_order: RankOrder

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.schedule == "interleaved1f1b" else 1

    @property
    def num_layers(self) -> int:
        """Layers that run."""
        return HEAD + 1 - (self.num_frozen + 1 if self.cached and self.num_frozen else 0)

    @property
    def is_possible(self) -> bool:
        size = self.arrangement[0]
        rounds = max(1, self.num_microbatches // size)
        return (
            size * self.stages_per_rank <= self.num_layers
            and not (self.schedule == "1f1b" and self.num_microbatches < size)
            and not (self.stages_per_rank > 1 and (size == 1 or self.num_microbatches % rounds != 0))
            and not (self.cached and not self.num_frozen)
        )

    def plan(self, generator: random.Random) -> Plan:
        """Makes a plan whose stages end at random layers."""
        size, num_replicas = self.arrangement
        first = HEAD + 1 - self.num_layers
        ends = sorted(generator.sample(range(first, HEAD), size * self.stages_per_rank - 1))
        stages = tuple(zip([first, *(end + 1 for end in ends)], [*ends, HEAD], strict=True))
        level = self.num_frozen if self.cached else 0
        return Plan(
            self.num_frozen, level, stages, num_replicas, self.num_microbatches, self.schedule, self.stages_per_rank,
            self.recompute, self.rank_order,
        )  # fmt: skip


def arrangements(world: int) -> Iterator[tuple[int, int]]:
    """Every factorisation of a world into devices of a pipeline and replicas."""
    return ((size, world // size) for size in range(1, world + 1) if world % size == 0)

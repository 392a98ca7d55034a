"""Pipeline schedules, one class each: what they accept, keep in flight, run in which order, and how long they take.

1F1B with three stages and four micro-batches; a device starts a pass as soon as what it needs is there::

    device 0   F0 F1 F2          B0 F3 B1    B2    B3
    device 1      F0 F1       B0 F2 B1 F3 B2    B3
    device 2         F0    B0 F1 B1 F2 B2 F3 B3

A new schedule is a class here, a row of :data:`SCHEDULES`, and torch's class in the table of the runtime.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, zip_longest
from math import inf
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pipetransformer.autopipe.plan import Layout

Moments = tuple[tuple[int, ...], ...]
"""Micro-batches between forward and backward in each stage of a device, at the moments that may be the worst."""


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one stage, forward or backward."""

    is_forward: bool
    stage: int
    microbatch: int


class Schedule(ABC):
    """The order in which the devices of a pipeline work through the micro-batches of a step.

    Attributes:
        name: The option's value.
        multi_stage: Devices may run several stages each.
    """

    name: ClassVar[str]
    multi_stage: ClassVar[bool] = False

    @abstractmethod
    def accepts(self, layout: Layout) -> bool:
        """Returns whether torch runs the schedule with these numbers of stages and micro-batches."""

    def min_microbatches(self, pipeline_size: int) -> int:
        """Returns the fewest micro-batches for so many devices."""
        return 1

    @abstractmethod
    def in_flight(self, device: int, layout: Layout) -> Moments:
        """Returns the worst moments of a device."""

    def least_in_flight(self, layout: Layout) -> int:
        """Returns micro-batches that every device holds at once in each of its stages, at its worst moment."""
        return 1

    @abstractmethod
    def order(self, layout: Layout, device: int) -> list[Pass]:
        """Returns the passes of a device of a pipeline, as torch's schedule of that name runs them."""

    def makespan(self, stages: Sequence[float], layout: Layout) -> float:
        """Returns the seconds until the last micro-batch is through, from those of each stage per micro-batch."""
        size = layout.pipeline_size
        busiest_s = max(sum(stages[device::size]) for device in range(size))
        return self.makespan_of(sum(stages), max(stages), busiest_s, layout)

    def makespan_of(self, total_s: float, slowest_s: float, busiest_s: float, layout: Layout) -> float:
        """Returns :meth:`makespan` from those of all stages, of the slowest stage, and of the busiest device.

        It must not fall when one of the three grows, so that lower bounds of them give a lower bound.

        A stage cannot be done before the first micro-batch passed all stages and the others passed this one. A device
        cannot be done before all its work and the wait for its first: ``M D + (T - D) / v`` with ``D`` the work of the
        busiest device, ``T`` that of all of them and ``v`` stages per rank, which shorten the wait (Narayanan et al.
        2021, 2.2). With one stage per rank the two are the same. 1F1B and GPipe take the same time.
        """
        passing_s = total_s + (layout.num_microbatches - 1) * slowest_s
        waiting_s = (total_s - busiest_s) / layout.stages_per_rank
        return max(passing_s, layout.num_microbatches * busiest_s + waiting_s)

    def slowest_within(self, makespan_s: float, total_s: float, layout: Layout) -> float:
        """Returns the seconds of the slowest stage that a makespan allows, given those of all stages."""
        num_later = layout.num_microbatches - 1
        return (makespan_s - total_s) / num_later if num_later else inf


class GPipe(Schedule):
    """All forward passes, then all backward passes (Huang et al. 2019)."""

    name = "gpipe"

    def accepts(self, layout: Layout) -> bool:
        return layout.stages_per_rank == 1

    def in_flight(self, device: int, layout: Layout) -> Moments:
        return ((layout.num_microbatches,),)

    def least_in_flight(self, layout: Layout) -> int:
        return layout.num_microbatches

    def order(self, layout: Layout, device: int) -> list[Pass]:
        return _alternating(layout, device, layout.num_microbatches, lead=layout.num_microbatches)


class OneForwardOneBackward(Schedule):
    """After the warm-up, one forward and one backward pass in turn (PipeDream-Flush)."""

    name = "1f1b"

    def accepts(self, layout: Layout) -> bool:
        return layout.stages_per_rank == 1 and layout.num_microbatches >= self.min_microbatches(layout.pipeline_size)

    def min_microbatches(self, pipeline_size: int) -> int:
        return pipeline_size

    def in_flight(self, device: int, layout: Layout) -> Moments:
        return ((min(layout.num_microbatches, layout.pipeline_size - device),),)

    def order(self, layout: Layout, device: int) -> list[Pass]:
        return _alternating(layout, device, layout.num_microbatches, lead=layout.pipeline_size - device)


class InterleavedOneForwardOneBackward(Schedule):
    """1F1B over several stages of each device, which shortens the wait (Narayanan et al. 2021)."""

    name = "interleaved1f1b"
    multi_stage = True

    def accepts(self, layout: Layout) -> bool:
        # torch's rounds, one per pipeline_size micro-batches, are equally long
        return layout.num_microbatches % max(1, layout.num_microbatches // layout.pipeline_size) == 0

    def in_flight(self, device: int, layout: Layout) -> Moments:
        return _interleaved_moments(
            device, layout.pipeline_size, layout.stages_per_rank, layout.num_microbatches, _per_round(layout)
        )

    def order(self, layout: Layout, device: int) -> list[Pass]:
        if layout.stages_per_rank == 1:
            return ONE_F_ONE_B.order(layout, device)
        per_round = _per_round(layout)
        lead = (layout.stages_per_rank - 1) * per_round + 2 * (layout.pipeline_size - 1 - device) + 1
        return _alternating(layout, device, per_round, lead)


GPIPE, ONE_F_ONE_B, INTERLEAVED = GPipe(), OneForwardOneBackward(), InterleavedOneForwardOneBackward()

SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in (ONE_F_ONE_B, GPIPE, INTERLEAVED)}
"""By name. All take the same time, so the search takes the first one that accepts a layout: it keeps least memory."""

REFUSED = {
    "interleaved_zero_bubble": "leaves gradients out where a stage below is frozen, and torch does not say so",
    "zbv_zero_bubble": "leaves gradients out where a stage below is frozen, and torch does not say so",
    "dualpipev": "computes wrong gradients where a stage below is frozen, and torch does not say so",
}
"""Schedules of torch that cannot be used, and the reason."""


def _per_round(layout: Layout) -> int:
    """Returns the micro-batches that a device takes through one of its stages before it turns to the next."""
    return layout.num_microbatches // max(1, layout.num_microbatches // layout.pipeline_size)


def _alternating(layout: Layout, device: int, per_round: int, lead: int) -> list[Pass]:
    """Returns ``lead`` forward passes, then one backward and one forward pass in turn as long as there are both."""
    stages = list(layout.device_stages(device))
    forwards = [Pass(True, *place) for place in _rounds(stages, layout.num_microbatches, per_round)]
    backwards = [Pass(False, *place) for place in _rounds(stages[::-1], layout.num_microbatches, per_round)]
    lead = min(lead, len(forwards))
    pairs = zip_longest(backwards, forwards[lead:])
    return forwards[:lead] + [one for one in chain.from_iterable(pairs) if one is not None]


def _rounds(stages: list[int], num_microbatches: int, per_round: int) -> list[tuple[int, int]]:
    """Returns (stage, micro-batch) in order: a round of micro-batches through every stage, then the next round."""
    starts = range(0, num_microbatches, per_round)
    rounds = [range(start, min(start + per_round, num_microbatches)) for start in starts]
    return [(stage, microbatch) for batch in rounds for stage in stages for microbatch in batch]


@lru_cache(maxsize=4096)
def _interleaved_moments(
    device: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int, per_round: int
) -> Moments:
    """Returns the moments of torch's ``ScheduleInterleaved1F1B``.

    A round of micro-batches goes through one stage of the device after the other, forwards from the lowest, backwards
    from the highest::

        2 stages per rank, 2 devices, 4 micro-batches, the last device
        forward      0 0  1   1   0   0   1   1            in the lower and the upper stage, after each forward:
        backward            1   1   0   0   1   1  0 0     1 0, 2 0, 2 1, 2 1, 3 0, 3 0, 2 1, 2 1
    """
    num_steps = stages_per_rank * num_microbatches
    warmup = min((stages_per_rank - 1) * per_round + 2 * (pipeline_size - 1 - device), num_steps)
    counts = [0] * stages_per_rank
    first, last = {}, {}
    for step in range(min(num_steps, warmup + 2 * stages_per_rank * per_round)):  # then it repeats
        up, down = step // per_round, (step - warmup) // per_round
        counts[up % stages_per_rank] += 1
        if step >= min(warmup, num_steps - 1):
            # while one stage fills and another empties evenly, the worst is at the start or the end
            last[up, down] = tuple(counts)
            first.setdefault((up, down), tuple(counts))
            counts[stages_per_rank - 1 - down % stages_per_rank] -= 1
    return tuple(sorted({*first.values(), *last.values()}))

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
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from pipetransformer.autopipe.plan import Layout


class Moment(NamedTuple):
    """The beginning of a backward pass of a device, at which it may take most memory.

    Attributes:
        in_flight: Micro-batches between forward and backward in each stage of the device, that of the pass included.
        has_gradients: Each stage that has been through a backward pass before.
        stage: That of the pass, counted on the device.
    """

    in_flight: tuple[int, ...]
    has_gradients: tuple[bool, ...]
    stage: int = 0


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
    def moments(self, device: int, layout: Layout) -> tuple[Moment, ...]:
        """Returns the moments of a device that may be its worst."""

    def least_in_flight(self, layout: Layout, has_gradients: bool) -> int:
        """Returns micro-batches that every device holds at once in each of its stages at some moment.

        Args:
            has_gradients: All its stages have gradients then.
        """
        return 0 if has_gradients else 1

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
        2021, 2.2). With one stage per rank the two are the same. 1F1B and GPipe take the same time, but for what each
        of them does itself, which is in the seconds of the stages.
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

    def moments(self, device: int, layout: Layout) -> tuple[Moment, ...]:
        return _moments_of_one_stage(layout.num_microbatches, layout)

    def least_in_flight(self, layout: Layout, has_gradients: bool) -> int:
        return layout.num_microbatches - has_gradients

    def order(self, layout: Layout, device: int) -> list[Pass]:
        return _alternating(layout, device, layout.num_microbatches, lead=layout.num_microbatches)


class OneForwardOneBackward(Schedule):
    """After the warm-up, one forward and one backward pass in turn (PipeDream-Flush)."""

    name = "1f1b"

    def accepts(self, layout: Layout) -> bool:
        return layout.stages_per_rank == 1 and layout.num_microbatches >= self.min_microbatches(layout.pipeline_size)

    def min_microbatches(self, pipeline_size: int) -> int:
        return pipeline_size

    def moments(self, device: int, layout: Layout) -> tuple[Moment, ...]:
        return _moments_of_one_stage(layout.pipeline_size - device, layout)

    def least_in_flight(self, layout: Layout, has_gradients: bool) -> int:
        return min(1, layout.num_microbatches - has_gradients)

    def order(self, layout: Layout, device: int) -> list[Pass]:
        return _alternating(layout, device, layout.num_microbatches, lead=layout.pipeline_size - device)


class InterleavedOneForwardOneBackward(Schedule):
    """1F1B over several stages of each device, which shortens the wait (Narayanan et al. 2021)."""

    name = "interleaved1f1b"
    multi_stage = True

    def accepts(self, layout: Layout) -> bool:
        # torch's rounds, one per pipeline_size micro-batches, are equally long
        return layout.num_microbatches % max(1, layout.num_microbatches // layout.pipeline_size) == 0

    def moments(self, device: int, layout: Layout) -> tuple[Moment, ...]:
        return _interleaved_moments(
            device, layout.pipeline_size, layout.stages_per_rank, layout.num_microbatches, _per_round(layout)
        )

    def order(self, layout: Layout, device: int) -> list[Pass]:
        per_round = _per_round(layout)
        lead = (layout.stages_per_rank - 1) * per_round + 2 * (layout.pipeline_size - 1 - device) + 1
        return _alternating(layout, device, per_round, lead)


GPIPE, ONE_F_ONE_B, INTERLEAVED = GPipe(), OneForwardOneBackward(), InterleavedOneForwardOneBackward()

SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in (ONE_F_ONE_B, GPIPE, INTERLEAVED)}
"""By name. The search takes the first one that accepts a layout: it keeps least memory. Besides what a schedule does
itself all take the same time; where GPipe does less, it is tried, too."""

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


def _moments_of_one_stage(lead: int, layout: Layout) -> tuple[Moment, ...]:
    """Returns the first and the second backward pass after ``lead`` forward passes."""
    count = min(lead, layout.num_microbatches)
    again = min(count, layout.num_microbatches - 1)  # another forward pass has filled it up, if there is one
    return (Moment((count,), (False,)), *([Moment((again,), (True,))] if again else []))


@lru_cache(maxsize=4096)
def _interleaved_moments(
    device: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int, per_round: int
) -> tuple[Moment, ...]:
    """Returns the moments of torch's ``ScheduleInterleaved1F1B``.

    A round of micro-batches goes through one stage of the device after the other, forwards from the lowest, backwards
    from the highest::

        2 stages per rank, 2 devices, 4 micro-batches, the last device
        forward      0 0  1   1   0   0   1   1            in the lower and the upper stage, after each forward:
        backward            1   1   0   0   1   1  0 0     1 0, 2 0, 2 1, 2 1, 3 0, 3 0, 2 1, 2 1
    """
    warmup = (stages_per_rank - 1) * per_round + 2 * (pipeline_size - 1 - device)
    period = stages_per_rank * per_round
    num_rounds = min(num_microbatches // per_round, warmup // period + 3)  # more of them repeat what was there
    num_forwards = num_rounds * period
    warmup = min(warmup, num_forwards)
    counts, has_gradients = [0] * stages_per_rank, [False] * stages_per_rank
    first, last = dict[object, Moment](), dict[object, Moment]()
    for step in range(num_forwards + warmup):
        up, down = step // per_round, (step - warmup) // per_round
        if step < num_forwards:
            counts[up % stages_per_rank] += 1
        if step >= warmup:
            stage = stages_per_rank - 1 - down % stages_per_rank
            moment = Moment(tuple(counts), tuple(has_gradients), stage)
            # while one stage fills and another empties evenly, the worst is at the start or the end
            last[up, down, moment.has_gradients] = moment
            first.setdefault((up, down, moment.has_gradients), moment)
            counts[stage] -= 1
            has_gradients[stage] = True
    return tuple(sorted({*first.values(), *last.values()}))

"""A schedule that the package does not have: one class for deciding, and torch's class in a row for doing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import ScheduleLoopedBFS

from pipetransformer.autopipe.plan import Layout
from pipetransformer.autopipe.schedules import SCHEDULES, Moment, Pass, Schedule
from pipetransformer.runtime.schedules import TORCH_SCHEDULES


class LoopedBFS(Schedule):
    """All micro-batches through one stage of a device before the next one (Lamy-Poirier 2022)."""

    name = "looped_bfs"
    multi_stage = True

    def accepts(self, layout: Layout) -> bool:
        return True

    def moments(self, device: int, layout: Layout) -> tuple[Moment, ...]:
        count, size = layout.num_microbatches, layout.stages_per_rank
        return tuple(
            Moment((*[count] * stage, left, *[0] * above), (*[False] * stage, left < count, *[True] * above), stage)
            for stage, above in ((size - 1 - above, above) for above in range(size))
            for left in range(count, max(0, count - 2), -1)
        )

    def least_in_flight(self, layout: Layout, has_gradients: bool) -> int:
        return 0 if has_gradients else layout.num_microbatches

    def order(self, layout: Layout, device: int) -> list[Pass]:
        stages, microbatches = layout.device_stages(device), range(layout.num_microbatches)
        forwards = [Pass(True, stage, microbatch) for stage in stages for microbatch in microbatches]
        return forwards + [Pass(False, one.stage, one.microbatch) for one in reversed(forwards)]


@contextmanager
def looped_bfs() -> Iterator[None]:
    """Inside, the schedule is there for the planner and the runtime of this process."""
    SCHEDULES[LoopedBFS.name] = LoopedBFS()
    TORCH_SCHEDULES[LoopedBFS.name] = ScheduleLoopedBFS
    try:
        yield
    finally:
        del SCHEDULES[LoopedBFS.name], TORCH_SCHEDULES[LoopedBFS.name]


def with_looped_bfs(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what a function of a worker returns with the schedule."""
    with looped_bfs():
        return function(*args)

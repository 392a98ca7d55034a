"""Traces of one measured step per plan, in the form of a simulated step."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch.distributed as dist

from pipetransformer.planning.history import NUM_WARMUP_STEPS, PlanRecord, RunHistory
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.trace import write_trace
from pipetransformer.runtime.tracing import Recorder
from pipetransformer.training.measured_step import Notes, measured_events
from pipetransformer.training.world import LocalRank


class Tracer:
    """Traces one step of each plan on one rank. Every rank makes the same calls, idle ones included.

    Args:
        run_dir: Folder in which rank 0 writes the traces; ``None`` traces nothing.
        recorder: Records the spans of this rank.
        timeline: Steps of the run.
        history: Plans in force so far.

    Attributes:
        files: Names of the traces so far, on rank 0.
    """

    def __init__(self, run_dir: Path | None, recorder: Recorder, timeline: Timeline, history: RunHistory) -> None:
        self._run_dir, self._recorder = run_dir, recorder
        self._timeline, self._history = timeline, history
        self.files: list[str] = []

    def step(self, step: int) -> AbstractContextManager[None]:
        """Returns the context in which a step, 0-based, has to run; it is traced if it is the one of its plan."""
        entry = self._history.entries[-1]
        if self._run_dir is None or not is_due(entry, step, self._timeline):
            return nullcontext()
        return self._trace(entry, self._run_dir)

    @contextmanager
    def _trace(self, entry: PlanRecord, run_dir: Path) -> Iterator[None]:
        entry.traced_step = len(entry.step_seconds)
        dist.barrier()
        start_s = time.perf_counter()
        with self._recorder.recording() as spans:
            yield
        own = Notes(LocalRank.here().index, start_s, spans)
        gathered: list[Notes] | None = [own] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, gathered)
        if gathered is not None:
            events = measured_events(entry.plan, gathered)
            self.files.append(write_trace(events, run_dir, len(self._history.entries) - 1).name)


def is_due(entry: PlanRecord, step: int, timeline: Timeline) -> bool:
    """Returns whether this step of the plan in force is the traced one, equal on every rank.

    It is the first after those that allocate and connect, or the last before the plan may end if that comes earlier.
    """
    may_end = timeline.is_decision_step(step + 1) or step + 1 == timeline.num_steps
    return entry.traced_step is None and (len(entry.step_seconds) >= NUM_WARMUP_STEPS or may_end)

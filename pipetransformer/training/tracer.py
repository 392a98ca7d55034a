"""Traces of one measured step per plan: when to record it, and its events in the form of a simulated step."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan
from pipetransformer.planning.history import NUM_WARMUP_STEPS, PlanRecord, RunHistory
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.trace import Event, pass_name, remove_traces, trace_files, write_trace
from pipetransformer.runtime.groups import barrier
from pipetransformer.runtime.tracing import Recorder, Span
from pipetransformer.training.world import LocalRank

PASSES = ("forward", "backward")
Key = tuple[int, str, int, int]


class Tracer:
    """Traces one step of each plan on one rank. Every rank makes the same calls, idle ones included.

    Args:
        run_dir: Folder in which rank 0 writes the traces; ``None`` traces nothing.
        recorder: Records the spans of this rank.
        timeline: Steps of the run.
        history: Plans in force so far.
    """

    def __init__(self, run_dir: Path | None, recorder: Recorder, timeline: Timeline, history: RunHistory) -> None:
        self._run_dir, self._recorder = run_dir, recorder
        self._timeline, self._history = timeline, history

    @property
    def files(self) -> list[str]:
        """Returns the names of the run's traces so far on rank 0; on other ranks, and where none are taken, nothing."""
        return [file.name for file in trace_files(self._run_dir)] if self._run_dir and dist.get_rank() == 0 else []

    def go_back(self) -> None:
        """Removes the traces of plans that the history does not have: of steps that the run makes again."""
        if self._run_dir is not None and dist.get_rank() == 0:
            remove_traces(self._run_dir, first=len(self._history.entries))

    def step(self, step: int) -> AbstractContextManager[None]:
        """Returns the context in which a step, 0-based, has to run; it is traced if it is the one of its plan."""
        entry = self._history.entries[-1]
        if self._run_dir is None or not is_due(entry, step, self._timeline):
            return nullcontext()
        return self._trace(entry, self._run_dir)

    @contextmanager
    def _trace(self, entry: PlanRecord, run_dir: Path) -> Iterator[None]:
        entry.traced_step = len(entry.step_seconds)
        barrier(self._recorder.device)
        start_s = time.perf_counter()
        with self._recorder.recording() as spans:
            yield
        own = Notes(LocalRank.here().index, start_s, spans)
        gathered: list[Notes] | None = [own] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, gathered)
        if gathered is not None:
            events = measured_events(entry.plan, gathered)
            write_trace(events, run_dir, len(self._history.entries) - 1)


def is_due(entry: PlanRecord, step: int, timeline: Timeline) -> bool:
    """Returns whether this step of the plan in force is the traced one, equal on every rank.

    It is the first after those that allocate and connect, or the last before the plan may end if that comes earlier.
    """
    may_end = timeline.is_decision_step(step + 1) or step + 1 == timeline.num_steps
    return entry.traced_step is None and (len(entry.step_seconds) >= NUM_WARMUP_STEPS or may_end)


@dataclass(frozen=True)
class Notes:
    """Spans that one rank recorded in a step.

    Attributes:
        node: Index of its node; the ranks of a node share a clock.
        start_s: Time at which it left the barrier before the step, in seconds of that clock.
        spans: Its passes, all-reduces and optimizer update.
    """

    node: int
    start_s: float
    spans: list[Span]


def measured_events(plan: Plan, notes: Sequence[Notes]) -> list[Event]:
    """Returns the events of one step on all ranks, by time, under the names of a simulated step.

    A transfer is drawn as far as it is exposed: it begins when the result exists and the receiving device is free, and
    ends when that device starts. Blank time is waiting, or the loading of the batch at the start.

    The step starts when the first rank of a node leaves the barrier. Between nodes the times differ by as much as this
    moment does, about the time of a message; within a node they are exact.

    Args:
        notes: The spans of each rank; idle ranks have none.
    """
    step = _MeasuredStep(plan, _since_the_start(notes))
    return sorted(step.events(), key=lambda event: (event.start_s, event.rank))


def _since_the_start(notes: Sequence[Notes]) -> list[list[Span]]:
    """Returns the spans of each rank by time, in seconds since the step began."""
    starts_s = {node: min(own.start_s for own in notes if own.node == node) for node in {own.node for own in notes}}
    return [
        sorted((_earlier(span, starts_s[own.node]) for span in own.spans), key=lambda span: span.start_s)
        for own in notes
    ]


def _earlier(span: Span, seconds: float) -> Span:
    return replace(span, start_s=span.start_s - seconds, end_s=span.end_s - seconds)


class _MeasuredStep:
    """Spans of each rank by time, without the backward calls on stages that have no active layer."""

    def __init__(self, plan: Plan, by_rank: list[list[Span]]) -> None:
        self._plan = plan
        self._by_rank = [[span for span in spans if self._happens(span)] for spans in by_rank]
        self._sent = {
            self._key(rank, span): (rank, span.end_s)  # torch sends a gradient after the stage's all-reduce
            for rank, spans in enumerate(self._by_rank)
            for span in spans
        }

    def events(self) -> Iterator[Event]:
        for rank, spans in enumerate(self._by_rank):
            for span in spans:
                name = self._name(span, span.stage) if span.kind in PASSES else span.kind
                yield Event(name, span.start_s, span.end_s - span.start_s, rank, span.kind)
            if self._plan.pipeline_size > 1:
                yield from self._arrivals(rank, spans)

    def _arrivals(self, rank: int, spans: list[Span]) -> Iterator[Event]:
        """Yields the transfers to a rank."""
        free_s = 0.0
        for span in spans:
            source = span.stage + (-1 if span.kind == "forward" else 1)
            if span.kind in PASSES and 0 <= source < self._plan.num_stages:
                sender, sent_s = self._sent[self._key(rank, replace(span, stage=source))]
                start_s = min(max(sent_s, free_s), span.start_s)
                name = f"send {self._name(span, source)}"
                yield Event(name, start_s, span.start_s - start_s, sender, "transfer")
            free_s = span.end_s

    def _happens(self, span: Span) -> bool:
        return span.kind != "backward" or self._plan.stages[span.stage][1] >= self._plan.first_active_layer

    def _key(self, rank: int, span: Span) -> Key:
        kind = "backward" if span.kind == "all-reduce" else span.kind
        return Topology(self._plan, rank).replica, kind, span.stage, span.microbatch

    def _name(self, span: Span, stage: int) -> str:
        return pass_name(span.kind == "forward", span.microbatch, stage, self._plan.stages_per_rank)

"""Events of a measured step, in the form in which a simulation draws one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan
from pipetransformer.report.trace import Event, pass_name
from pipetransformer.runtime.tracing import Span

PASSES = ("forward", "backward")
Key = tuple[int, str, int, int]


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

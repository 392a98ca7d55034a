"""What the ranks noted in one step, as the events that a simulation draws for it."""

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
    """What one rank noted.

    Attributes:
        node: Its machine; the ranks of one share a clock.
        start_s: When it left the barrier at which the step begins.
    """

    node: int
    start_s: float
    spans: list[Span]


def measured_events(plan: Plan, notes: Sequence[Notes]) -> list[Event]:
    """The events of one step on all ranks, by time, under the names of a simulated step.

    A transfer is drawn as far as it is exposed: from when the result is there and the device that needs it is free,
    until that device starts. What is blank is waiting, or the reading of the batch at the start.

    The step starts when the first rank of a machine leaves the barrier. Between machines the times differ by as much as
    this moment does, about the time of a message; on one machine they are exact.

    Args:
        notes: Of each rank; idle ones have no spans.
    """
    step = _MeasuredStep(plan, _since_the_start(notes))
    return sorted(step.events(), key=lambda event: (event.start_s, event.rank))


def _since_the_start(notes: Sequence[Notes]) -> list[list[Span]]:
    """The spans of each rank, by time."""
    starts_s = {node: min(own.start_s for own in notes if own.node == node) for node in {own.node for own in notes}}
    return [
        sorted((_earlier(span, starts_s[own.node]) for span in own.spans), key=lambda span: span.start_s)
        for own in notes
    ]


def _earlier(span: Span, seconds: float) -> Span:
    return replace(span, start_s=span.start_s - seconds, end_s=span.end_s - seconds)


class _MeasuredStep:
    """The spans of each rank, by time; the call of a backward pass on a stage without active layers is left out."""

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
        """The transfers to a rank."""
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

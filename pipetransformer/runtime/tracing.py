"""Records when a rank's passes begin and end, in the steps in which it is asked to; in others it does nothing."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

P = ParamSpec("P")
R = TypeVar("R")
Moment = Callable[[], float]
"""Returns seconds on the clock that all processes of a machine share; on a GPU only once its stream got there."""
Clock = Callable[[], Moment]
NOTHING = nullcontext()


@dataclass(frozen=True)
class Span:
    """The time that a rank spent on one thing, in seconds on the clock of its machine.

    Attributes:
        kind: ``forward``, ``backward``, ``all-reduce`` (the exposed part) or ``optimizer``.
        stage: The stage of a pass.
        microbatch: The micro-batch of a pass.
        start_s: When it began.
        end_s: When it ended.
    """

    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class _Record:
    kind: str
    stage: int
    microbatch: int
    start: Moment
    end: Moment

    def span(self) -> Span:
        return Span(self.kind, self.stage, self.microbatch, self.start(), self.end())


class Recorder:
    """The recorder of one rank. On a GPU it records when kernels run, not when they are launched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clock: Clock | None = None
        self._records: list[_Record] = []

    @contextmanager
    def recording(self) -> Iterator[list[Span]]:
        """Records all spans inside; the list is filled at the end."""
        spans: list[Span] = []
        is_cuda = self.device.type == "cuda"
        self._records, self._clock = [], _DeviceClock() if is_cuda else _host_clock
        try:
            yield spans
            if is_cuda:
                torch.cuda.synchronize()
            spans += [record.span() for record in self._records]
        finally:
            self._records, self._clock = [], None

    def span(self, kind: str, stage: int = 0, microbatch: int = 0) -> AbstractContextManager[None]:
        """Records the code inside as one span."""
        return NOTHING if self._clock is None else self._span(self._clock, kind, stage, microbatch)

    def backward(self, microbatch: int, module: nn.Module, all_reduces: bool) -> AbstractContextManager[None]:
        """Records the backward pass of a plan's only stage inside, and the all-reduce of its gradients after it."""
        if self._clock is None:
            return NOTHING
        reduced = module.parameters() if all_reduces and isinstance(module, DistributedDataParallel) else ()
        return self._backward(self._clock, microbatch, reduced)

    def extending(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wraps a function so that it extends the span before it: the loss belongs to the forward pass."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result = function(*args, **kwargs)
            if self._clock is not None:
                last = self._records.pop()
                self._add(last.kind, last.stage, last.microbatch, last.start, self._clock())
            return result

        return call

    @contextmanager
    def _span(self, clock: Clock, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        start = clock()
        yield
        self._add(kind, stage, microbatch, start, clock())

    @contextmanager
    def _backward(self, clock: Clock, microbatch: int, reduced: Iterable[nn.Parameter]) -> Iterator[None]:
        """Ends the pass when the last gradient is there; the rest is the all-reduce."""
        ready: list[Moment] = []
        active = [parameter for parameter in reduced if parameter.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(lambda _: ready.append(clock())) for p in active]
        start = clock()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        end = clock()
        computed = ready[-1] if ready else end
        self._add("backward", 0, microbatch, start, computed)
        if ready:
            self._add("all-reduce", 0, microbatch, computed, end)

    def _add(self, kind: str, stage: int, microbatch: int, start: Moment, end: Moment) -> None:
        self._records.append(_Record(kind, stage, microbatch, start, end))


def _host_clock() -> Moment:
    now = time.perf_counter()
    return lambda: now


class _DeviceClock:
    """The clock of a GPU's current stream, on the host's clock to about ten microseconds."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._begin = _event()
        self._begin.synchronize()
        self._begin_s = time.perf_counter()

    def __call__(self) -> Moment:
        event = _event()
        return lambda: self._begin_s + self._begin.elapsed_time(event) / 1000


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

"""Notes when a rank's passes begin and end, in the steps in which it is asked to; in all others it does nothing."""

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
"""Seconds on the clock that all processes of a machine share; of a GPU they are known once it has come so far."""
Timeline = Callable[[], Moment]
NOTHING = nullcontext()


@dataclass(frozen=True)
class Span:
    """What a rank did for some time, in seconds on the clock of its machine.

    Attributes:
        kind: ``forward``, ``backward``, ``all-reduce`` (as far as the computing waits for it) or ``optimizer``.
        stage, microbatch: Of a pass.
    """

    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class _Noted:
    kind: str
    stage: int
    microbatch: int
    start: Moment
    end: Moment

    def span(self) -> Span:
        return Span(self.kind, self.stage, self.microbatch, self.start(), self.end())


class Recorder:
    """Of one rank. On a GPU it notes when the kernels run, not when they were launched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timeline: Timeline | None = None
        self._noted: list[_Noted] = []

    @contextmanager
    def recording(self) -> Iterator[list[Span]]:
        """Notes what happens inside; the list is filled at the end."""
        spans: list[Span] = []
        is_cuda = self._device.type == "cuda"
        self._noted, self._timeline = [], _DeviceClock() if is_cuda else _host_clock
        try:
            yield spans
            if is_cuda:
                torch.cuda.synchronize()
            spans += [noted.span() for noted in self._noted]
        finally:
            self._noted, self._timeline = [], None

    def span(self, kind: str, stage: int = 0, microbatch: int = 0) -> AbstractContextManager[None]:
        """What is run inside is of this kind."""
        return NOTHING if self._timeline is None else self._span(self._timeline, kind, stage, microbatch)

    def backward(self, microbatch: int, module: nn.Module, averages: bool) -> AbstractContextManager[None]:
        """Inside, a plan's only stage runs backward, and where it averages gradients over replicas waits for that."""
        if self._timeline is None:
            return NOTHING
        averaged = module.parameters() if averages and isinstance(module, DistributedDataParallel) else ()
        return self._backward(self._timeline, microbatch, averaged)

    def extending(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, whose time counts as part of the span before it: the loss belongs to the forward pass."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result = function(*args, **kwargs)
            if self._timeline is not None:
                last = self._noted.pop()
                self._note(last.kind, last.stage, last.microbatch, last.start, self._timeline())
            return result

        return call

    @contextmanager
    def _span(self, timeline: Timeline, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        start = timeline()
        yield
        self._note(kind, stage, microbatch, start, timeline())

    @contextmanager
    def _backward(self, timeline: Timeline, microbatch: int, averaged: Iterable[nn.Parameter]) -> Iterator[None]:
        """The pass itself has ended when the last gradient is there; what is left is the all-reduce."""
        ready: list[Moment] = []
        active = [parameter for parameter in averaged if parameter.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(lambda _: ready.append(timeline())) for p in active]
        start = timeline()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        end = timeline()
        computed = ready[-1] if ready else end
        self._note("backward", 0, microbatch, start, computed)
        if ready:
            self._note("all-reduce", 0, microbatch, computed, end)

    def _note(self, kind: str, stage: int, microbatch: int, start: Moment, end: Moment) -> None:
        self._noted.append(_Noted(kind, stage, microbatch, start, end))


def _host_clock() -> Moment:
    now = time.perf_counter()
    return lambda: now


class _DeviceClock:
    """Moments of the current stream of a GPU, on the host's clock to about ten microseconds."""

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

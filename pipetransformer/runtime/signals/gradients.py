"""Signals of the gradient norms, which every step has already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipetransformer.runtime.signals.base import MeanCollector, SignalContext


class GradientNorm(MeanCollector):
    """The norm of a block's gradient over the global batch before clipping, mean over the steps."""

    def add_norms(self, norms: Sequence[float]) -> None:
        self.add(norms)


class GradientChange(MeanCollector):
    """The accumulated change of the norm from step to step, over the accumulated norm.

    ``sum |g_t - g_(t-1)| / sum g_t`` over the steps since the last decision, where ``g_t`` is the norm in step t.
    The first step after a decision has a change too, from the last one before it; the first of the run has none.
    """

    def __init__(self, context: SignalContext) -> None:
        super().__init__(context)
        self._norms = [0.0] * context.num_blocks
        self._last: list[float] | None = None

    def add_norms(self, norms: Sequence[float]) -> None:
        if self._last is not None:
            both = zip(norms, self._last, strict=True)
            pairs = [(norm, last) if norm and last else (0.0, 0.0) for norm, last in both]  # not of a thaw
            self.add([abs(norm - last) for norm, last in pairs])
            self._norms = [total + norm for total, (norm, _) in zip(self._norms, pairs, strict=True)]
        self._last = list(norms)

    def read(self) -> Sequence[float]:
        return [change / norm if norm else 0.0 for change, norm in zip(self._sums, self._norms, strict=True)]

    def start_anew(self) -> None:
        super().start_anew()
        self._norms = [0.0] * len(self._norms)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"norms": list(self._norms), "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._norms = [float(each) for each in state["norms"]]
        self._last = None if state["last"] is None else [float(each) for each in state["last"]]

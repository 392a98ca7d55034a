"""The collectors of a run: those that its policy asks for, and no others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pipetransformer.errors import UserError
from pipetransformer.runtime.groups import broadcast_from_rank0
from pipetransformer.runtime.result import StepResult
from pipetransformer.runtime.signals.base import Collector, SignalContext, UpdateCollector
from pipetransformer.runtime.signals.gradients import GradientChange, GradientNorm
from pipetransformer.runtime.signals.probe import FeatureChange, Plasticity
from pipetransformer.runtime.signals.updates import EVERY, LossDrop, RelativeUpdate, UpdateMeter
from pipetransformer.runtime.signals.weights import WeightChange


class StepShare(Collector):
    """The seconds of a step with 0 to L blocks frozen over those with none, by the profile, shape (L + 1,).

    Frozen blocks are computed, so that it is the same with a cache and without. A run that goes on measures its layers
    anew, and keeps the shares by which it has decided.
    """

    def __init__(self, context: SignalContext) -> None:
        super().__init__(context)
        self._shares: list[float] = []

    def read(self) -> Sequence[float]:
        self._shares = self._shares or list(self.context.step_shares())
        return self._shares

    def state_dict(self) -> dict[str, Any]:
        return {"shares": [*self.read()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shares = [float(share) for share in state.get("shares", [])]  # earlier releases kept none


COLLECTORS: dict[str, type[Collector]] = {
    "gradient_norm": GradientNorm,
    "gradient_change": GradientChange,
    "relative_update": RelativeUpdate,
    "weight_change": WeightChange,
    "loss_drop": LossDrop,
    "feature_change": FeatureChange,
    "plasticity": Plasticity,
    "step_share": StepShare,
}
"""The collector of each signal that a policy can ask for."""


class SignalCollectors:
    """Measures signals on one rank. Every rank makes the same calls.

    Args:
        names: The signals that the policy asks for. The gradient norm comes with every step and is always there.
        context: What there is to measure.

    Attributes:
        context: What there is to measure.
        seconds: Time that each signal took on this rank since the last decision, by name; updates together as
            ``updates``.
        totals: The same of the whole run so far.

    Raises:
        UserError: There is no such signal.
    """

    def __init__(self, names: Sequence[str], context: SignalContext) -> None:
        if unknown := sorted({*names} - COLLECTORS.keys()):
            raise UserError(f"the policy asks for signals that nobody measures: {', '.join(unknown)}; there are "
                            f"{', '.join(COLLECTORS)}")  # fmt: skip
        self.context = context
        wanted = dict.fromkeys(("gradient_norm", *names))
        self._collectors = {name: COLLECTORS[name](context) for name in wanted}
        self._meter = UpdateMeter([each for each in self._collectors.values() if isinstance(each, UpdateCollector)])
        self.seconds: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self._metered_s = 0.0

    @property
    def observer(self) -> UpdateMeter | None:
        """Measures updates, for the runtime; ``None`` where no signal needs it."""
        return self._meter if self._meter.collectors else None

    def set_due(self, num_updates: int) -> None:
        """Takes the number of updates since the last decision, before a step."""
        self._meter.is_due = num_updates % EVERY == 0

    def add_step(self, result: StepResult) -> None:
        """Takes a step that has changed the weights."""
        for collector in self._collectors.values():
            collector.add_norms(result.layer_norms[1:-1])

    def read(self) -> dict[str, tuple[float, ...]]:
        """Returns each signal, equal on every rank. Collective."""
        self.seconds = {"updates": self._meter.seconds - self._metered_s} if self._meter.seconds else {}
        self._metered_s = self._meter.seconds
        values = {name: self._read(name, collector) for name, collector in self._collectors.items()}
        self.totals |= {name: self.totals.get(name, 0.0) + each for name, each in self.seconds.items()}
        return broadcast_from_rank0(values)

    def _read(self, name: str, collector: Collector) -> tuple[float, ...]:
        start = time.perf_counter()
        values = tuple(collector.read())
        if name != "gradient_norm" and not isinstance(collector, UpdateCollector):
            self.seconds[name] = time.perf_counter() - start
        return values

    def start_anew(self) -> None:
        """Begins the time after a decision."""
        for collector in self._collectors.values():
            collector.start_anew()

    def figures(self) -> dict[str, float]:
        """Returns the seconds that measuring has taken on this rank so far, by name."""
        rest_s = self._meter.seconds - self._metered_s
        return self.totals | ({"updates": self.totals.get("updates", 0.0) + rest_s} if rest_s else {})

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can hold without loss."""
        states = {name: collector.state_dict() for name, collector in self._collectors.items()}
        return {"collectors": states, "seconds": self.figures()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values of :meth:`state_dict`; signals that its policy did not ask for begin anew."""
        self.totals = {name: float(seconds) for name, seconds in state["seconds"].items()}
        self._metered_s = self._meter.seconds
        for name, collector in self._collectors.items():
            if name in state["collectors"]:
                collector.load_state_dict(state["collectors"][name])

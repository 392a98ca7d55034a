"""Egeria: blocks freeze when their plasticity is level, and all train again when the learning rate has dropped."""

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.freeze.common import NOISE, all_frozen, blocks, check_numbers, lowest_run


@dataclass(frozen=True, kw_only=True)
class Egeria(FreezePolicy):
    """Freezes the lowest active blocks whose plasticity no longer rises or falls.

    Plasticity is the distance between what a block and a reference make of the same samples. It is smoothed, and a
    line is laid through its last values. Written from the abstract of the paper (Wang et al., EuroSys 2023, arXiv
    2201.06227) and descriptions of it.

    Attributes:
        window: Decisions through which the line is laid, and over which plasticity is smoothed; at least 2.
        tolerance: Slope per decision, over the largest plasticity so far, below which a block is calm.
        patience: Calm decisions in a row after which a block freezes; at least 1.
        rate_drop: Part of the learning rate at the first freeze at which all blocks train again; ``None``: never.
    """

    interval: float | None = 0.1
    window: int = 3
    tolerance: float = 0.1
    patience: int = 2
    rate_drop: float | None = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 2:
            raise UserError(f"freeze.window={self.window} is too short for a slope; give 2 decisions or more")
        if not 0 < self.tolerance < inf:
            raise UserError(
                f"freeze.tolerance={self.tolerance} is no slope; give a number above 0, as 0.1 of the "
                "largest plasticity per decision"
            )
        if self.patience < 1:
            raise UserError(f"freeze.patience={self.patience} is no number of decisions; give 1 or more")
        if self.rate_drop is not None and not 0 < self.rate_drop < 1:
            raise UserError(
                f"freeze.rate_drop={self.rate_drop} is no part of a learning rate; give a number between 0 and 1, or "
                "null to unfreeze nothing"
            )

    @property
    def signals(self) -> tuple[str, ...]:
        return ("plasticity",)

    @property
    def may_unfreeze(self) -> bool:
        return self.rate_drop is not None

    @property
    def decisions_needed(self) -> int:
        return self.window + self.patience  # the first decision has no reference yet

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the decision and, as state, the blocks' histories and the rate at the first freeze.

        Raises:
            UserError: A plasticity is NaN.
        """
        check_numbers(signals, "plasticity")
        rate = state.get("rate") if signals.num_frozen else None
        if self._has_dropped(signals.rate, rate):
            return self._unfreeze(signals, rate), {}
        histories = [self._follow(signals, block, state) for block in range(signals.num_blocks)]
        decision = self._freeze(signals, histories)
        if decision.num_frozen and rate is None:
            rate = signals.rate
        return decision, {"rate": rate, "histories": histories}

    def _has_dropped(self, rate: float, first: float | None) -> bool:
        return self.rate_drop is not None and first is not None and rate <= self.rate_drop * first * (1 + NOISE)

    def _unfreeze(self, signals: Signals, first: float | None) -> Decision:
        reason = (
            f"the learning rate is {signals.rate:.3g}, at most {self.rate_drop:g} of {first:.3g}, with which the first "
            "block froze: all blocks train again"
        )
        return Decision(0, "rate", reason, {"rate": signals.rate, "rate_at_freeze": float(first or 0)})

    def _follow(self, signals: Signals, block: int, state: State) -> dict[str, Any]:
        """Returns a block's history with what is measured now; it begins anew where there is no reference."""
        plasticity = signals["plasticity"][block]
        if block < signals.num_frozen or not isfinite(plasticity):
            return _begin()
        history = state["histories"][block] if "histories" in state else _begin()
        smoothed = smooth(history["smoothed"], plasticity, self.window)
        peak = max(history["peak"], smoothed[-1])
        is_calm = len(smoothed) == self.window and relative_slope(smoothed, peak) < self.tolerance
        return {"smoothed": smoothed, "peak": peak, "calm": history["calm"] + 1 if is_calm else 0}

    def _freeze(self, signals: Signals, histories: list[dict[str, Any]]) -> Decision:
        lowest = signals.num_frozen
        if lowest == signals.num_blocks:
            return all_frozen(signals)
        num_frozen = lowest_run(signals, [history["calm"] >= self.patience for history in histories])
        return Decision(num_frozen, *self._reason(lowest, num_frozen, histories), self._terms(histories[lowest]))

    def _reason(self, lowest: int, num_frozen: int, histories: list[dict[str, Any]]) -> tuple[str, str]:
        if num_frozen > lowest:
            level = f"the plasticity of {blocks(lowest, num_frozen)} has a slope below {self.tolerance:g} of its peak"
            times = "1 decision" if self.patience == 1 else f"{self.patience} decisions"
            return "slope", f"{level} for {times} or more"
        history = histories[lowest]
        if len(history["smoothed"]) < self.window:
            seen = f"block {lowest + 1} has {len(history['smoothed'])} of {self.window} plasticities"
            return "window", f"{seen} through which a line is laid"
        slope = relative_slope(history["smoothed"], history["peak"])
        calm = f"{history['calm']} of {self.patience} decisions below {self.tolerance:g}"
        return "patience", f"the plasticity of block {lowest + 1} has a slope of {slope:.3g} of its peak; {calm}"

    def _terms(self, history: dict[str, Any]) -> dict[str, float]:
        """Returns the numbers of the lowest active block."""
        terms = {"tolerance": self.tolerance, "calm": float(history["calm"])}
        if history["smoothed"]:
            terms |= {"plasticity": history["smoothed"][-1], "peak": history["peak"]}
        if len(history["smoothed"]) == self.window:
            terms["slope"] = relative_slope(history["smoothed"], history["peak"])
        return terms


def _begin() -> dict[str, Any]:
    """Returns the history of a block of which nothing has been measured."""
    return {"smoothed": [], "peak": 0.0, "calm": 0}


def smooth(smoothed: list[float], value: float, window: int) -> list[float]:
    """Returns the last ``window`` values of an exponential average with a weight of ``2 / (window + 1)``."""
    last = smoothed[-1] if smoothed else value
    return [*smoothed, last + 2 / (window + 1) * (value - last)][-window:]


def relative_slope(values: list[float], peak: float) -> float:
    """Returns the steepness of the line of least squares through values one decision apart, over a peak."""
    middle = (len(values) - 1) / 2
    rise = sum((place - middle) * value for place, value in enumerate(values))
    run = sum((place - middle) ** 2 for place in range(len(values)))
    return abs(rise / run) / peak if peak else 0.0

"""A threshold: the lowest blocks that change less than a constant freeze."""

from dataclasses import dataclass
from math import inf

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.freeze.common import all_frozen, check_numbers, freeze_below, relative_changes, remember

SIGNALS = {
    "gradient_norm": "change of the gradient norm between decisions",
    "gradient_change": "change of the gradient norm from step to step",
    "relative_update": "relative update of a step",
    "weight_change": "change of the weights between decisions",
}
"""Changes that can be compared with the threshold, in words."""


@dataclass(frozen=True, kw_only=True)
class ThresholdRule(FreezePolicy):
    """Freezes the lowest active blocks whose change is below ``tau``, once a part of the run has passed.

    GradES (arXiv 2509.01842) as a rule for blocks: it freezes single matrices, which saves no input gradients.

    Attributes:
        signal: One of :data:`SIGNALS`. ``gradient_norm`` is compared with the decision before.
        tau: The threshold.
        warmup: Fraction of the run before which nothing freezes.
    """

    interval: float | None = 0.1
    signal: str = "weight_change"
    tau: float = 0.01
    warmup: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signal not in SIGNALS:
            raise UserError(f"freeze.signal={self.signal} is unknown; choose one of {', '.join(SIGNALS)}")
        if not 0 < self.tau < inf:
            raise UserError(
                f"freeze.tau={self.tau} is not a relative change; give a number above 0, below which blocks freeze"
            )
        if not 0 <= self.warmup < 1:
            raise UserError(
                f"freeze.warmup={self.warmup} is not a fraction of the run after which blocks can freeze; give 0 or "
                "more and less than 1"
            )

    @property
    def signals(self) -> tuple[str, ...]:
        return (self.signal,)

    @property
    def decisions_needed(self) -> int:
        return 2 if self.signal in ("gradient_norm", "weight_change") else 1  # those compare two decisions

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the decision and, with ``signal=gradient_norm``, the norms as ``{"norms": [...]}``.

        Raises:
            UserError: A number of the signal shows that the training has diverged.
        """
        self._check(signals)
        if signals.num_frozen == signals.num_blocks:
            return all_frozen(signals), state
        changes, new_state = signals[self.signal], state
        if self.signal == "gradient_norm":
            changes = relative_changes(state.get("norms"), changes)
            new_state = {"norms": remember(signals, self.signal)}
        if signals.progress < self.warmup:
            reason = f"{signals.progress:.0%} of the run has passed, and nothing freezes before {self.warmup:.0%}"
            return Decision(signals.num_frozen, "warmup", reason, {"tau": self.tau}), new_state
        return freeze_below(signals, changes, self.tau, SIGNALS[self.signal]), new_state

    def _check(self, signals: Signals) -> None:
        if self.signal == "weight_change":  # infinite without a reference
            check_numbers(signals, self.signal)
        else:
            signals.check_finite(self.signal)

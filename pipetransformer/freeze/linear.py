"""A frozen prefix that grows in proportion to the run, whatever the gradients are."""

from dataclasses import dataclass
from math import floor

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.freeze.common import NOISE, all_frozen


@dataclass(frozen=True, kw_only=True)
class LinearSchedule(FreezePolicy):
    """``n(t) = floor(L level (t - start) / (1 - start))`` at the fraction ``t`` of the run, and 0 before ``start``.

    Attributes:
        start: Fraction of the run before which nothing freezes.
        level: Fraction of the blocks that is frozen at the end of the run.
    """

    interval: float | None = 0.1
    start: float = 0.5
    level: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.start < 1:
            raise UserError(
                f"freeze.start={self.start} is not a fraction of the run after which blocks can freeze; give 0 or more "
                "and less than 1"
            )
        if not 0 < self.level <= 1:
            raise UserError(
                f"freeze.level={self.level} is not the fraction of the blocks that is frozen in the end; give a number "
                "above 0 and at most 1, or take freeze=none"
            )

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the prefix at this fraction of the run."""
        if signals.num_frozen == signals.num_blocks:
            return all_frozen(signals), state
        depth = self.depth(signals.progress, signals.num_blocks)
        num_frozen = max(signals.num_frozen, floor(depth + NOISE))  # a frozen block stays frozen
        if signals.progress < self.start:
            reason = f"{signals.progress:.0%} of the run has passed, and nothing freezes before {self.start:.0%}"
            return Decision(num_frozen, "start", reason, {"linear": depth}), state
        reason = f"after {signals.progress:.0%} of the run {depth:.3g} of {signals.num_blocks} blocks are due"
        return Decision(num_frozen, "linear", reason, {"linear": depth}), state

    def depth(self, progress: float, num_blocks: int) -> float:
        """Returns the prefix as a real number of blocks."""
        return num_blocks * self.level * max(0.0, progress - self.start) / (1 - self.start)

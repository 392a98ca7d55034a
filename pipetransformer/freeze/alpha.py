"""The paper's cap alone: each decision freezes a fraction of what is still active."""

from dataclasses import dataclass
from math import ceil

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.freeze.common import NOISE, all_frozen


@dataclass(frozen=True, kw_only=True)
class AlphaCap(FreezePolicy):
    """``n(T) = ceil(L (1 - (1 - alpha)^T))``: the first term of the paper's rule, whatever the gradients are.

    Attributes:
        alpha: Fraction of the active blocks that one decision freezes, between 0 and 1, both excluded.
    """

    alpha: float = 1 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alpha(self.alpha)

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the decision and the real value of the cap as ``{"cap": blocks}``."""
        if signals.num_frozen == signals.num_blocks:
            return all_frozen(signals), state
        cap = next_cap(self.alpha, signals, state)
        num_frozen = max(signals.num_frozen, whole_blocks(cap))
        reason = f"{self.alpha:.0%} of the active blocks freeze at once, {cap:.3g} of {signals.num_blocks} so far"
        return Decision(num_frozen, "cap", reason, {"cap": cap}), {"cap": cap}


def check_alpha(alpha: float) -> None:
    """Raises an error where ``alpha`` is not between 0 and 1.

    Raises:
        UserError: With the value.
    """
    if not 0 < alpha < 1:
        raise UserError(f"freeze.alpha={alpha} is not a fraction of the active blocks; give a number between 0 and 1")


def next_cap(alpha: float, signals: Signals, state: State) -> float:
    """Returns the cap as a real number of blocks: ``start + alpha (L - start)``.

    It starts from its last real value, ``state["cap"]``, where the cap bound, and else from the frozen blocks. Where
    more is frozen, as by a target, it bound no longer.
    """
    start = state.get("cap", float(signals.num_frozen))
    if whole_blocks(start) < signals.num_frozen:
        start = float(signals.num_frozen)
    return start + alpha * (signals.num_blocks - start)


def whole_blocks(num_blocks: float) -> int:
    """Rounds up, but for the noise that would make a fifth block of 4.0000000000000004."""
    return ceil(num_blocks - NOISE)

"""The freeze rule of the paper: a cap on what may freeze at once, and the block whose gradient is smallest."""

from dataclasses import dataclass

from pipetransformer.freeze.alpha import check_alpha, next_cap, whole_blocks
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.freeze.common import all_frozen


@dataclass(frozen=True, kw_only=True)
class PaperRule(FreezePolicy):
    """``n(T) = min(n(T-1) + alpha (L - n(T-1)), argmin of the gradient norms of the active blocks)`` (section 3.1).

    The formula leaves two things open, which are read as follows.

    - The argmin, a block, stands beside a number of blocks. The active block with the smallest gradient norm (the
      lowest of equals) has converged furthest, so it freezes together with all blocks below it: block ``a``, counted
      from 0, gives ``a + 1``. Giving ``a`` would stop all freezing as soon as the lowest active block has the
      smallest norm, which is the usual case.
    - The cap is a real number and only the result is rounded up. As long as the cap binds, the next cap starts from
      its real value, so that the cap alone gives ``ceil(L (1 - (1 - alpha)^T))``; after the gradients have bound, it
      starts from the frozen blocks.

    Attributes:
        alpha: Largest fraction of the active blocks that one decision freezes, between 0 and 1, both excluded.
    """

    alpha: float = 1 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alpha(self.alpha)

    @property
    def signals(self) -> tuple[str, ...]:
        return ("gradient_norm",)

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the decision and, where the cap bound, its real value as ``{"cap": blocks}``.

        Raises:
            UserError: A gradient norm is not finite.
        """
        if signals.num_frozen == signals.num_blocks:
            return all_frozen(signals), state
        cap = next_cap(self.alpha, signals, state)
        block = _smallest_gradient(signals)
        cap_binds = cap <= block + 1
        num_frozen = max(signals.num_frozen, whole_blocks(min(cap, block + 1)))
        decision = Decision(
            num_frozen,
            bound="cap" if cap_binds else "gradient",
            reason=_reason(self.alpha, cap, signals, block),
            terms={"cap": cap, "argmin": float(block + 1)},
        )
        return decision, {"cap": cap} if cap_binds else {}


def _reason(alpha: float, cap: float, signals: Signals, block: int) -> str:
    if cap <= block + 1:
        limit = f"at most {alpha:.0%} of the active blocks at once, a cap of {cap:.3g}"
        return f"{limit}; the gradients would allow {block + 1}"
    norm = signals["gradient_norm"][block]
    return f"block {block + 1} has the smallest gradient norm, {norm:.3g}; alpha={alpha:.3g} would allow {cap:.3g}"


def _smallest_gradient(signals: Signals) -> int:
    """Returns the active block, counted from 0, whose gradient norm is smallest."""
    norms = signals["gradient_norm"]
    assert len(norms) == signals.num_blocks, signals
    signals.check_finite("gradient_norm")
    return min(range(signals.num_frozen, signals.num_blocks), key=lambda block: norms[block])

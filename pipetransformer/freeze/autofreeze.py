"""AutoFreeze: the lowest blocks whose gradient norms change least from one interval to the next."""

from dataclasses import dataclass
from math import floor, isfinite

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.freeze.common import all_frozen, block_terms, blocks, lowest_run, relative_changes, remember


@dataclass(frozen=True, kw_only=True)
class AutoFreeze(FreezePolicy):
    """``eta_l = |A_l(T-1) - A_l(T)| / A_l(T-1)``, the change of the gradient norms that an interval accumulates.

    Of the active blocks, those freeze that are the lowest and have, one after the other, an ``eta`` of at most the
    ``percentile`` of all active ones. Written from the description in the paper (Liu, Agarwal and Venkataraman,
    arXiv 2102.01386); the mean norm stands for the sum, since intervals have equally many steps.

    Attributes:
        percentile: Percentile of the changes up to which a block has converged, 0 or more and below 100.
    """

    interval: float | None = 0.1
    percentile: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.percentile < 100:
            raise UserError(
                f"freeze.percentile={self.percentile} is not a percentile that some blocks exceed; give 0 or more and "
                "less than 100, as 50 for the median"
            )

    @property
    def signals(self) -> tuple[str, ...]:
        return ("gradient_norm",)

    @property
    def decisions_needed(self) -> int:
        return 2  # the first interval has none before it

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the decision and the norms of this interval as ``{"norms": [...]}``.

        Raises:
            UserError: A gradient norm is not finite.
        """
        signals.check_finite("gradient_norm")
        if signals.num_frozen == signals.num_blocks:
            return all_frozen(signals), state
        changes = relative_changes(state.get("norms"), signals["gradient_norm"])
        return self._compare(signals, changes), {"norms": remember(signals, "gradient_norm")}

    def _compare(self, signals: Signals, changes: tuple[float, ...]) -> Decision:
        """Returns the decision by the changes (L,), infinite where a block has no earlier norm."""
        lowest = signals.num_frozen
        if not isfinite(changes[lowest]):
            reason = f"there is no gradient norm of block {lowest + 1} from the interval before"
            return Decision(lowest, "reference", reason)
        limit = percentile_of([change for change in changes[lowest:] if isfinite(change)], self.percentile)
        num_frozen = lowest_run(signals, [change <= limit for change in changes])
        terms = {"percentile": limit} | block_terms(signals, "change", changes)
        return Decision(num_frozen, *self._reason(lowest, num_frozen, changes, limit), terms)

    def _reason(self, lowest: int, num_frozen: int, changes: tuple[float, ...], limit: float) -> tuple[str, str]:
        percentile = f"{limit:.3g}, the percentile {self.percentile:g} of the active blocks"
        if num_frozen == lowest:
            held_back = f"the gradient norm of block {lowest + 1} has changed by {changes[lowest]:.3g} of itself"
            return "change", f"{held_back}, more than {percentile}"
        largest = max(changes[lowest:num_frozen])
        calm = f"the gradient norms of {blocks(lowest, num_frozen)} have changed by at most {largest:.3g} of themselves"
        return "percentile", f"{calm}, within {percentile}"


def percentile_of(values: list[float], percentile: float) -> float:
    """Returns a percentile of finite numbers, interpolated between the two nearest."""
    ordered = sorted(values)
    position = percentile / 100 * (len(ordered) - 1)
    low = floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])

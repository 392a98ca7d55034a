"""A budget of time: the prefix that fits it and gives up the least fall of the loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.freeze.common import all_frozen


@dataclass(frozen=True, kw_only=True)
class BudgetRule(FreezePolicy):
    """Freezes the prefix that brings the passes below a share of their time and gives up the least fall of the loss.

    GreenTrainer (Huang et al., ICLR 2024, arXiv 2309.13192) picks tensors by a dynamic programme. There are only
    ``L + 1`` prefixes, so that all of them are compared.

    Attributes:
        time_share: Seconds of the layers' passes over those with nothing frozen, at most; above 0 and below 1. The
            forward pass of frozen blocks counts, so that below about a third no prefix fits, and all blocks freeze.
    """

    time_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.time_share < 1:
            raise UserError(
                f"freeze.time_share={self.time_share} is not a share of a full step; give a number between 0 and 1, "
                "or take freeze=none"
            )

    @property
    def signals(self) -> tuple[str, ...]:
        return ("loss_drop", "step_share")

    def shortfall(self, step_shares: Sequence[float]) -> str | None:
        """Returns that no prefix can meet the share, where none does."""
        least = min(step_shares)
        if least <= self.time_share:
            return None
        return (
            f"no prefix meets freeze.time_share={self.time_share:g}, so that all blocks freeze at the first decision: "
            f"the passes of a step then take {least:.3g} of those with nothing frozen; give more than that"
        )

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the decision and each block's last fall of the loss as ``{"loss_drop": [...]}``.

        Raises:
            UserError: A fall of the loss is not finite.
        """
        signals.check_finite("loss_drop")
        drops = _last_drops(signals, state)
        if signals.num_frozen == signals.num_blocks:
            return all_frozen(signals), state
        return self._choose(signals, given_up(drops)), {"loss_drop": drops}

    def _choose(self, signals: Signals, lost: list[float]) -> Decision:
        """Returns the decision by the fall of the loss (L + 1,) that each prefix gives up."""
        shares, num_blocks = signals["step_share"], signals.num_blocks
        assert len(shares) == num_blocks + 1, shares
        prefixes = range(signals.num_frozen, num_blocks + 1)
        fitting = [prefix for prefix in prefixes if shares[prefix] <= self.time_share]
        num_frozen = min(fitting, key=lambda prefix: (lost[prefix], prefix)) if fitting else num_blocks
        terms = {"share": shares[num_frozen], "time_share": self.time_share, "loss_drop_given_up": lost[num_frozen]}
        takes = f"with {num_frozen} of {num_blocks} blocks frozen the passes take {shares[num_frozen]:.3g} of all"
        if not fitting:
            return Decision(num_frozen, "nothing", f"no prefix meets time_share={self.time_share:.3g}; {takes}", terms)
        reason = (
            f"{takes}, within time_share={self.time_share:.3g}, and gives up {lost[num_frozen]:.3g} of the loss's fall "
            f"per step, the least of {len(fitting)} prefixes that fit"
        )
        return Decision(num_frozen, "budget", reason, terms)


def _last_drops(signals: Signals, state: State) -> list[float]:
    """Returns the fall of the loss (L,) of each block when it last trained."""
    remembered = state.get("loss_drop", [0.0] * signals.num_blocks)
    measured = signals["loss_drop"]
    return [remembered[block] if block < signals.num_frozen else measured[block] for block in range(len(measured))]


def given_up(drops: list[float]) -> list[float]:
    """Returns the fall of the loss that each prefix gives up (L + 1,): the sum over the blocks below its end."""
    return list(accumulate(drops, initial=0.0))

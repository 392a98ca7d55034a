"""The similarity of features: the lowest blocks whose output no longer changes freeze."""

from dataclasses import dataclass

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.freeze.common import all_frozen, check_numbers, freeze_below


@dataclass(frozen=True, kw_only=True)
class CkaRule(FreezePolicy):
    """Freezes the lowest active blocks whose output on a probe batch is what it was at the last decision.

    The change is 1 - CKA, the linear centered kernel alignment of Kornblith et al. (ICML 2019), in the place that
    SVCCA has in the freeze training of Raghu et al. (NeurIPS 2017).

    Attributes:
        tau: Change of the features below which a block has converged, above 0 and at most 1.
    """

    interval: float | None = 0.1
    tau: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.tau <= 1:
            raise UserError(
                f"freeze.tau={self.tau} is not a change of features, which is 1 - CKA; give a number above 0 and at "
                "most 1, as 0.01"
            )

    @property
    def signals(self) -> tuple[str, ...]:
        return ("feature_change",)

    @property
    def decisions_needed(self) -> int:
        return 2  # the first decision has no earlier features

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the decision; there is nothing to remember.

        Raises:
            UserError: A change is NaN.
        """
        check_numbers(signals, "feature_change")
        if signals.num_frozen == signals.num_blocks:
            return all_frozen(signals), state
        return freeze_below(signals, signals["feature_change"], self.tau, "change of the features"), state

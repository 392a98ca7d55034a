"""No freezing: the control against which every other policy is measured."""

from dataclasses import dataclass

from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State


@dataclass(frozen=True, kw_only=True)
class NoFreezing(FreezePolicy):
    """Trains every block to the end."""

    @property
    def never_freezes(self) -> bool:
        return True

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the frozen prefix as it is."""
        return Decision(signals.num_frozen, bound="none", reason="freezing is switched off"), state

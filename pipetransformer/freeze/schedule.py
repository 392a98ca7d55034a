"""A frozen prefix that is written down in advance, to replay a run or to compare at equal frozen fraction."""

from dataclasses import dataclass
from itertools import pairwise

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State


@dataclass(frozen=True, kw_only=True)
class FixedSchedule(FreezePolicy):
    """Freezes by a list, whatever the gradients are.

    Attributes:
        num_frozen: The frozen prefix, in blocks, at each decision in order; the last one stays.
        at_start: Blocks that are frozen before the first step, with the weights that the model came with.
    """

    num_frozen: list[int]
    at_start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        prefixes = self.num_frozen
        if not prefixes or prefixes[0] < 0 or any(later < earlier for earlier, later in pairwise(prefixes)):
            raise UserError(
                f"freeze.num_frozen={list(prefixes)} is not a schedule; give at least one number of blocks, none "
                "below 0 and none smaller than the one before it (a frozen block stays frozen)"
            )
        if not 0 <= self.at_start <= prefixes[0]:
            raise UserError(
                f"freeze.at_start={self.at_start} is not a number of blocks from 0 to the first of freeze.num_frozen="
                f"{list(prefixes)}; a frozen block stays frozen"
            )

    @property
    def frozen_at_start(self) -> int:
        return self.at_start

    def check(self, num_blocks: int) -> None:
        super().check(num_blocks)
        if self.num_frozen[-1] > num_blocks:
            raise UserError(
                f"freeze.num_frozen={list(self.num_frozen)} freezes up to {self.num_frozen[-1]} blocks, but the model "
                f"has {num_blocks}; lower the schedule (freeze.num_frozen=)"
            )

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the scheduled prefix."""
        entry = min(signals.decision, len(self.num_frozen) - 1)
        scheduled = self.num_frozen[entry]
        reason = (
            f"the schedule asks for {scheduled} of {signals.num_blocks} blocks at entry {entry + 1} of "
            f"{len(self.num_frozen)}; {signals.num_frozen} were frozen before"
        )
        num_frozen = max(signals.num_frozen, scheduled)  # a frozen block stays frozen
        return Decision(num_frozen, "schedule", reason, {"schedule": float(scheduled)}), state

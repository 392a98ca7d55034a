"""A prefix that is frozen from the start to the end, so that many runs can read one store of its output."""

from dataclasses import dataclass

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State


@dataclass(frozen=True, kw_only=True)
class Prefix(FreezePolicy):
    """Freezes the lowest blocks, with the weights that the model came with, and never another one.

    Nothing is decided after the start, so that ``interval`` and ``guard`` have no effect.

    Attributes:
        num_blocks: The frozen prefix, in blocks. All blocks of the model leave the head alone to train.
    """

    num_blocks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_blocks < 1:
            raise UserError(
                f"freeze.num_blocks={self.num_blocks} freezes nothing; give at least 1 block, or take freeze=none"
            )

    @property
    def is_static(self) -> bool:
        return True

    @property
    def frozen_at_start(self) -> int:
        return self.num_blocks

    def check(self, num_blocks: int) -> None:
        if self.num_blocks > num_blocks:
            raise UserError(f"freeze.num_blocks={self.num_blocks} is more than the {num_blocks} blocks of the model")

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the prefix."""
        num_frozen = max(signals.num_frozen, self.num_blocks)  # a frozen block stays frozen
        reason = f"{self.num_blocks} of {signals.num_blocks} blocks are frozen from the start to the end"
        return Decision(num_frozen, "prefix", reason), state

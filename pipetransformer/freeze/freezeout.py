"""FreezeOut: each block's learning rate anneals to zero by itself, the lowest first, and then the block freezes."""

from dataclasses import dataclass
from math import cos, pi

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.freeze.common import NOISE, all_frozen


@dataclass(frozen=True, kw_only=True)
class FreezeOut(FreezePolicy):
    """``rate_l(t) = (1 + cos(pi t / t_l)) / 2`` until the fraction ``t_l`` of the run, then block ``l`` freezes.

    The ends ``t_l`` lie evenly between ``t0`` for the first block and 1 for the last. The factors multiply the run's
    own schedule: ``optim.schedule=constant`` gives FreezeOut as published (Brock et al., arXiv 1706.04983).

    Attributes:
        t0: Fraction of the run at which the first block freezes, before the cube.
        cubic: Takes the cube of the ends, so that low blocks freeze earlier.
        scale: Divides the rate of a block by its end, so that all blocks move equally far in sum.
    """

    interval: float | None = 0.1
    t0: float = 0.8
    cubic: bool = True
    scale: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.t0 < 1:
            raise UserError(
                f"freeze.t0={self.t0} is not a fraction of the run within which the first block can freeze; give a "
                "number between 0 and 1"
            )

    @property
    def has_own_rates(self) -> bool:
        return True

    def ends(self, num_blocks: int) -> tuple[float, ...]:
        """Returns the fraction of the run at which the rate of each block is zero, shape (L,)."""
        steps = max(1, num_blocks - 1)
        linear = [1 - (1 - self.t0) * (num_blocks - 1 - block) / steps for block in range(num_blocks)]
        return tuple(end**3 if self.cubic else end for end in linear)

    def rate_factors(self, progress: float, num_blocks: int) -> tuple[float, ...]:
        """Returns the factor of each block's learning rate at a fraction of the run, shape (L,)."""
        return tuple(self._factor(progress, end) for end in self.ends(num_blocks))

    def _factor(self, progress: float, end: float) -> float:
        if progress >= end:
            return 0.0
        annealed = 0.5 * (1 + cos(pi * progress / end))
        return annealed / end if self.scale else annealed

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the blocks whose rate has reached zero."""
        if signals.num_frozen == signals.num_blocks:
            return all_frozen(signals), state
        ends, progress = self.ends(signals.num_blocks), signals.progress
        annealed = sum(end <= progress + NOISE for end in ends)
        num_frozen = max(signals.num_frozen, annealed)
        terms = {"progress": progress} | ({"next_end": ends[num_frozen]} if num_frozen < signals.num_blocks else {})
        if num_frozen == signals.num_frozen:
            reason = f"block {num_frozen + 1} trains until {ends[num_frozen]:.3g} of the run; {progress:.3g} has passed"
            return Decision(num_frozen, "rate", reason, terms), state
        reason = (
            f"the rate of block {num_frozen} is zero from {ends[num_frozen - 1]:.3g} of the run on; "
            f"{progress:.3g} has passed"
        )
        return Decision(num_frozen, "annealed", reason, terms), state

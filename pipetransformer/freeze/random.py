"""A random schedule: the control that shows what the choice of the moment is worth."""

import random
from dataclasses import dataclass
from functools import cache
from math import fsum

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.freeze.common import all_frozen

_HALVINGS = 100  # more than a float has bits


@dataclass(frozen=True, kw_only=True)
class RandomSchedule(FreezePolicy):
    """Freezes block by block at random times, with a mean frozen fraction that is given.

    Attributes:
        fraction: Mean over the run of the frozen fraction of the blocks, if decisions came at every instant.
        draw_seed: Another one gives other times.
    """

    interval: float | None = 0.1
    fraction: float = 0.5
    draw_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction < 1:
            raise UserError(
                f"freeze.fraction={self.fraction} is not a mean frozen fraction; give a number between 0 and 1, or "
                "take freeze=none"
            )

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the blocks whose time has come."""
        if signals.num_frozen == signals.num_blocks:
            return all_frozen(signals), state
        times = freeze_times(signals.num_blocks, self.fraction, self.draw_seed)
        due = sum(signals.progress >= time for time in times)
        num_frozen = max(signals.num_frozen, due)  # a frozen block stays frozen
        upcoming = times[num_frozen : num_frozen + 1]
        after = f"; block {num_frozen + 1} follows at {upcoming[0]:.3g}" if upcoming else ""
        reason = f"by the draw {due} of {signals.num_blocks} blocks are due at {signals.progress:.3g} of the run{after}"
        return Decision(num_frozen, "draw", reason, {"due": float(due)}), state


@cache
def freeze_times(num_blocks: int, fraction: float, seed: int) -> tuple[float, ...]:
    """Returns the fraction of the run at which each block freezes, shape (L,), in ascending order.

    Uniform draws are raised to the power with which their mean is ``1 - fraction``: a block that freezes at time ``t``
    is frozen for ``1 - t`` of the run. Python draws alike on every platform.
    """
    draw = random.Random(seed)
    uniform = sorted(1 - draw.random() for _ in range(num_blocks))  # above 0, so that a power can bring them to 1
    low, high = 0.0, 1.0
    while _mean_power(uniform, high) > 1 - fraction:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_power(uniform, middle) > 1 - fraction else (low, middle)
    return tuple(time**high for time in uniform)


def _mean_power(values: list[float], power: float) -> float:
    return fsum(value**power for value in values) / len(values)

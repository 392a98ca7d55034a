"""Parts that several policies have in common."""

from collections.abc import Sequence
from math import inf, isfinite, isnan

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, Signals

NOISE = 1e-9
"""Rounding of a number of blocks, a fraction of the run or a metric, that decides nothing: 0.8 - 0.79 is above 0.01."""


def all_frozen(signals: Signals) -> Decision:
    """Returns the decision when no block is left to freeze."""
    return Decision(signals.num_frozen, "all frozen", f"all {signals.num_blocks} blocks are frozen")


def lowest_run(signals: Signals, may_freeze: Sequence[bool]) -> int:
    """Returns the prefix that ends below the lowest active block that may not freeze.

    Args:
        may_freeze: Of each block (L,); those of frozen blocks do not count.
    """
    active = range(signals.num_frozen, signals.num_blocks)
    return next((block for block in active if not may_freeze[block]), signals.num_blocks)


def freeze_below(signals: Signals, changes: Sequence[float], tau: float, name: str) -> Decision:
    """Returns the decision that freezes the lowest active blocks whose change is below a threshold.

    Args:
        changes: Of each block (L,); infinite where there is nothing to compare with.
        tau: The threshold, finite.
        name: The change in words.
    """
    num_frozen = lowest_run(signals, [change < tau for change in changes])
    terms = {"tau": tau} | block_terms(signals, "change", changes)
    if num_frozen > signals.num_frozen:
        largest = max(changes[signals.num_frozen : num_frozen])
        reason = f"the {name} of {blocks(signals.num_frozen, num_frozen)} is at most {largest:.3g}, below tau={tau:.3g}"
        return Decision(num_frozen, "tau", reason, terms)
    return Decision(num_frozen, *_held_back(num_frozen, changes[num_frozen], tau, name), terms)


def _held_back(block: int, change: float, tau: float, name: str) -> tuple[str, str]:
    if not isfinite(change):
        return "reference", f"there is nothing yet with which to compare the {name} of block {block + 1}"
    return "change", f"the {name} of block {block + 1} is {change:.3g}, not below tau={tau:.3g}"


def blocks(start: int, stop: int) -> str:
    """Returns the name of blocks ``start..stop-1``, counted from 1 as everywhere in the log."""
    return f"block {stop}" if stop == start + 1 else f"blocks {start + 1} to {stop}"


def block_terms(signals: Signals, name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns the numbers of the active blocks as terms of a decision, without those that are not finite."""
    active = range(signals.num_frozen, signals.num_blocks)
    return {f"{name}/block_{block + 1:02d}": values[block] for block in active if isfinite(values[block])}


def remember(signals: Signals, name: str) -> list[float | None]:
    """Returns a signal for the state: ``None`` for frozen blocks, which are not measured."""
    return [None if block < signals.num_frozen else value for block, value in enumerate(signals[name])]


def relative_changes(last: Sequence[float | None] | None, values: Sequence[float]) -> tuple[float, ...]:
    """Returns ``|last - now| / last`` of each block (L,), infinite where there is no last value."""
    pairs = zip(last or [None] * len(values), values, strict=True)
    return tuple(_relative_change(before, now) for before, now in pairs)


def _relative_change(last: float | None, now: float) -> float:
    if last is None:
        return inf
    if last == now:
        return 0.0
    return abs(last - now) / last if last else inf


def check_numbers(signals: Signals, name: str) -> None:
    """Raises an error where an active block's signal is NaN. Infinite ones have no reference yet.

    Raises:
        UserError: With the block.
    """
    for block in range(signals.num_frozen, signals.num_blocks):
        if isnan(signals[name][block]):
            raise UserError(
                f"the {name.replace('_', ' ')} of block {block + 1} is nan at freeze decision {signals.decision}: "
                "training has diverged; lower the learning rate (optim.lr=)"
            )

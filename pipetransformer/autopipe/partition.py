"""The exact partition of layers into stages: contiguous runs whose slowest one is as fast as possible."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

Runs = tuple[tuple[int, int], ...]
Fits = Callable[[int, int, int], bool]


def partition(
    seconds: Sequence[float],
    num_stages: int,
    fits: Fits,
    boundary_seconds: Sequence[Sequence[float]] | None = None,
    limit_s: float = inf,
) -> Runs | None:
    """Cuts layers into stages so that the slowest stage is as fast as any cut allows.

    Dynamic programme over (stage, end of the stage), run under a bound on the slowest stage that starts near the
    perfect balance and grows until a solution shows: a tight bound leaves few runs to look at.

    Args:
        seconds: Time of each layer, not negative.
        num_stages: Stages, each of at least one layer.
        fits: ``fits(stage, first, last)``: the device of ``stage`` can hold layers ``first .. last``. Must hold for
            every part of a run for which it holds.
        boundary_seconds: What each stage pays on top when it ends at a layer, one row per stage; nothing if left out.
        limit_s: Only what has no slower stage.

    Returns:
        The first and last index of each stage, or ``None`` if nothing fits. Of equal solutions always the same one.
    """
    num_layers = len(seconds)
    if not 1 <= num_stages <= num_layers:
        return None
    table = _Table(seconds, boundary_seconds or [[0.0] * num_layers] * num_stages, num_stages, fits)
    for bound in table.bounds(limit_s):
        if runs := table.solve(bound):
            return runs
    return None


class _Table:
    """The programme's table; a stage's end is the layer at which the next one starts."""

    def __init__(
        self, seconds: Sequence[float], boundary: Sequence[Sequence[float]], num_stages: int, fits: Fits
    ) -> None:
        self.until = [0.0, *accumulate(seconds)]
        self.boundary, self.num_stages, self.fits = boundary, num_stages, fits
        self.num_layers = len(seconds)
        self.balanced = max(max(seconds), self.until[-1] / num_stages)  # no partition is faster than this

    def bounds(self, limit_s: float) -> list[float]:
        """Ever looser bounds on the slowest stage; the last one holds for every partition within the limit."""
        loosest = min(limit_s, self.until[-1] + max(map(max, self.boundary)))
        tighter = (self.balanced * slack for slack in (1.01, 1.1, 1.5))
        return [*(bound for bound in tighter if bound < loosest), loosest] if self.balanced <= loosest else []

    def solve(self, bound: float) -> Runs | None:
        """The best partition whose slowest stage stays within the bound."""
        slowest = {0: 0.0}  # of the stages so far, by their end
        starts: list[dict[int, int]] = []
        for stage in range(self.num_stages):
            slowest, chosen = self._add_stage(stage, slowest, bound)
            starts.append(chosen)
        return _follow(starts, self.num_layers) if self.num_layers in slowest else None

    def _add_stage(
        self, stage: int, slowest: dict[int, float], bound: float
    ) -> tuple[dict[int, float], dict[int, int]]:
        """Extends every reached end by one stage; also returns the best start of the stage for each new end."""
        boundary, num_later = self.boundary[stage], self.num_stages - stage - 1
        # the later stages take at least a layer each, and at most the bound
        earliest = bisect_left(self.until, self.until[-1] - num_later * bound)
        latest = self.num_layers - num_later
        extended: dict[int, float] = {}
        starts: dict[int, int] = {}
        settled = earliest - 1  # no later start can do better for an end up to here
        for start, so_far in slowest.items():
            settled = max(settled, start)
            for end in range(settled + 1, latest + 1):
                run_s = self.until[end] - self.until[start]
                if run_s > bound:
                    break
                slowest_s = max(so_far, run_s + boundary[end - 1], self.balanced)
                if slowest_s > bound or slowest_s >= extended.get(end, inf):
                    continue
                if not self.fits(stage, start, end - 1):
                    break
                extended[end], starts[end] = slowest_s, start
                if slowest_s == self.balanced and end == settled + 1:
                    settled = end
        return dict(sorted(extended.items())), starts


def _follow(starts: list[dict[int, int]], num_layers: int) -> Runs:
    """The runs, read from the best start of the last stage back to the first."""
    runs: list[tuple[int, int]] = []
    end = num_layers
    for chosen in reversed(starts):
        runs.append((chosen[end], end - 1))
        end = chosen[end]
    return tuple(reversed(runs))

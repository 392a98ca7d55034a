"""The exact partition of layers into stages: contiguous runs whose slowest one is as fast as possible."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf

from pipetransformer.autopipe.plan import Stages

Fits = Callable[[int, int, int], bool]
TOLERANCE = 1.01
"""How far a bound may be from the smallest one."""
MAX_BISECTIONS = 10


def partition(
    seconds: Sequence[float],
    num_stages: int,
    fits: Fits,
    boundary_seconds: Sequence[Sequence[float]] | None = None,
    limit_s: float = inf,
) -> Stages | None:
    """Cuts layers into stages so that the slowest stage is as fast as any cut allows.

    Dynamic programme over (stage, end of the stage), run under a bound on the slowest stage that starts near the
    smallest one that may have a solution and grows until one shows: a tight bound leaves few runs to look at.

    Args:
        seconds: Time of each layer, not negative.
        num_stages: Stages, each of at least one layer.
        fits: ``fits(stage, first, last)``: the device of ``stage`` can hold layers ``first .. last``. Must hold for
            every part of a run for which it holds, runs to the last layer and runs from the first one each by
            themselves: they hand nothing on, and get nothing.
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

    def bounds(self, limit_s: float) -> Iterator[float]:
        """Ever looser bounds on the slowest stage; the last one holds for every partition within the limit.

        None where no partition is within it.
        """
        loosest = min(limit_s, self.until[-1] + max(map(max, self.boundary)))
        if self.balanced > loosest or not self._reaches(loosest):
            return
        smallest = self._smallest(loosest)
        yield from (smallest * slack for slack in (1.0, 1.1, 1.5) if smallest * slack < loosest)
        yield loosest

    def _smallest(self, loosest: float) -> float:
        """A bound that the stages reach the end with, near the smallest one."""
        low, high = self.balanced, min(self.balanced * TOLERANCE, loosest)
        if self._reaches(high):
            return high
        high = loosest
        for _ in range(MAX_BISECTIONS):
            if high <= low * TOLERANCE:
                break
            middle = (low + high) / 2
            low, high = (low, middle) if self._reaches(middle) else (middle, high)
        return high

    def _reaches(self, bound: float) -> bool:
        """Whether the last stage gets to the end where each goes as far as it can; if not, no partition does.

        What starts later may end wherever an earlier start may, so going far never does harm. A stage that cannot hold
        the layer at its turn holds none: a partition may have left that layer to a later one.
        """
        end = 0
        for stage in range(self.num_stages):
            end = self._furthest(stage, end, bound)
        return end == self.num_layers

    def _furthest(self, stage: int, start: int, bound: float) -> int:
        """The last end that a stage can have, or its start if there is none."""
        until, row = self.until, self.boundary[stage]
        ends = range(start + 1, self._last_in_time(stage, start, bound) + 1)
        in_time = [end for end in ends if until[end] - until[start] + row[end - 1] <= bound]
        return self._last_fitting(stage, start, in_time)

    def _last_fitting(self, stage: int, start: int, ends: Sequence[int]) -> int:
        """The last of some ends that a stage fits with, or its start if there is none."""
        if not ends or self.fits(stage, start, ends[-1] - 1):
            return ends[-1] if ends else start
        num_fitting = bisect_left(ends, True, key=lambda end: not self.fits(stage, start, end - 1))
        return ends[num_fitting - 1] if num_fitting else start

    def _last_in_time(self, stage: int, start: int, bound: float) -> int:
        """The last end of a stage whose layers are within the bound, whatever its boundary takes."""
        begun, latest = self.until[start], self.num_layers - (self.num_stages - stage - 1)
        return bisect_right(self.until, bound, start, latest + 1, key=lambda until: until - begun) - 1

    def solve(self, bound: float) -> Stages | None:
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
            settled, furthest = max(settled, start), None
            for end in range(settled + 1, latest + 1):
                run_s = self.until[end] - self.until[start]
                if run_s > bound:
                    break
                slowest_s = max(so_far, run_s + boundary[end - 1], self.balanced)
                if slowest_s > bound or slowest_s >= extended.get(end, inf):
                    continue
                if furthest is None:
                    ends = range(end, self._last_in_time(stage, start, bound) + 1)
                    furthest = self._last_fitting(stage, start, ends)
                if end > furthest:
                    break
                extended[end], starts[end] = slowest_s, start
                if slowest_s == self.balanced and end == settled + 1:
                    settled = end
        return dict(sorted(extended.items())), starts


def _follow(starts: list[dict[int, int]], num_layers: int) -> Stages:
    """The runs, read from the best start of the last stage back to the first."""
    runs: list[tuple[int, int]] = []
    end = num_layers
    for chosen in reversed(starts):
        runs.append((chosen[end], end - 1))
        end = chosen[end]
    return tuple(reversed(runs))

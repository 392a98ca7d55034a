"""The exact assignment of contiguous layers to stages.

With one stage per device, :func:`partition` minimises the slowest one by dynamic programming. With several, the cost of
a device is not a sum over its stages, so dynamic programming does not apply: :func:`interleave` branches and bounds.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf

from pipetransformer.autopipe.plan import Stages

Fits = Callable[[int, int, int], bool]
Bound = Callable[[Stages], float]

TOLERANCE = 1.01
"""How far a bound may be from the smallest one."""
MAX_BISECTIONS = 10
MAX_EVALUATIONS = 500


def partition(
    seconds: Sequence[float],
    num_stages: int,
    fits: Fits,
    boundary_seconds: Sequence[Sequence[float]] | None = None,
    limit_s: float = inf,
) -> Stages | None:
    """Cuts layers into stages so that the slowest stage is as fast as any cut allows.

    Dynamic programme over (stage, end of the stage). It runs under a bound on the slowest stage, which starts near the
    smallest one that may have a solution and grows until there is one: under a tight bound few stages are possible.

    Args:
        seconds: Time of each layer, not negative.
        num_stages: Stages, each of at least one layer.
        fits: ``fits(stage, first, last)``: the device of ``stage`` can hold layers ``first .. last``. It must hold for
            every part of a stage for which it holds. Stages that end with the last layer are compared among themselves,
            and so are those that begin with the first: they send nothing, or receive nothing.
        boundary_seconds: The time that each stage adds when it ends at a layer, one row per stage; zero if left out.
        limit_s: The slowest that a stage may be.

    Returns:
        The first and last index of each stage, or ``None`` if nothing fits. Of equal solutions always the same one.
    """
    num_layers = len(seconds)
    if not 1 <= num_stages <= num_layers:
        return None
    table = _Table(seconds, boundary_seconds or [[0.0] * num_layers] * num_stages, num_stages, fits)
    for bound in table.bounds(limit_s):
        if stages := table.solve(bound):
            return stages
    return None


class _Table:
    """The table of the dynamic programme; a stage's end is the layer at which the next one starts."""

    def __init__(
        self, seconds: Sequence[float], boundary: Sequence[Sequence[float]], num_stages: int, fits: Fits
    ) -> None:
        self.until = [0.0, *accumulate(seconds)]  # (num_layers + 1,): of the layers below each one
        self.boundary, self.num_stages, self.fits = boundary, num_stages, fits
        self.num_layers = len(seconds)
        self.balanced = max(max(seconds), self.until[-1] / num_stages)  # no partition is faster than this

    def bounds(self, limit_s: float) -> Iterator[float]:
        """Yields ever looser bounds on the slowest stage; the last one holds for every partition within the limit.

        Yields nothing where no partition is within it.
        """
        loosest = min(limit_s, self.until[-1] + max(map(max, self.boundary)))
        if self.balanced > loosest or not self._reaches(loosest):
            return
        smallest = self._smallest(loosest)
        yield from (smallest * slack for slack in (1.0, 1.1, 1.5) if smallest * slack < loosest)
        yield loosest

    def _smallest(self, loosest: float) -> float:
        """Returns a bound with which the stages reach the end, near the smallest such bound."""
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
        """Returns whether the stages reach the head when each takes all it can; if not, no partition does.

        A later start can end wherever an earlier one can, so the greedy choice loses nothing.
        """
        end = 0
        # A stage that cannot hold the next layer takes none: a partition may have given that layer to a later stage,
        # and the answer has to be true wherever there may be a partition.
        for stage in range(self.num_stages):
            end = self._furthest(stage, end, bound)
        return end == self.num_layers

    def _furthest(self, stage: int, start: int, bound: float) -> int:
        """Returns the last end that a stage can have, or its start if there is none."""
        until, row = self.until, self.boundary[stage]
        # boundaries differ from layer to layer, so a later end may be within the bound where an earlier one is not
        ends = range(start + 1, self._last_in_time(stage, start, bound) + 1)
        in_time = [end for end in ends if until[end] - until[start] + row[end - 1] <= bound]
        return self._last_fitting(stage, start, in_time)

    def _last_fitting(self, stage: int, start: int, ends: Sequence[int]) -> int:
        """Returns the last of some ends with which a stage fits, or its start if there is none."""
        # a stage that ends with the head sends nothing, so it may fit where a shorter one does not
        if not ends or self.fits(stage, start, ends[-1] - 1):
            return ends[-1] if ends else start
        num_fitting = bisect_left(ends, True, key=lambda end: not self.fits(stage, start, end - 1))
        return ends[num_fitting - 1] if num_fitting else start

    def _last_in_time(self, stage: int, start: int, bound: float) -> int:
        """Returns the last end of a stage whose layers are within the bound, whatever its boundary takes."""
        begun, latest = self.until[start], self.num_layers - (self.num_stages - stage - 1)
        return bisect_right(self.until, bound, start, latest + 1, key=lambda until: until - begun) - 1

    def solve(self, bound: float) -> Stages | None:
        """Returns the best partition whose slowest stage stays within the bound."""
        slowest = {0: 0.0}  # seconds of the slowest stage so far, by the end of the last one
        starts: list[dict[int, int]] = []
        for stage in range(self.num_stages):
            slowest, chosen = self._add_stage(stage, slowest, bound)
            starts.append(chosen)
        return _follow(starts, self.num_layers) if self.num_layers in slowest else None

    def _add_stage(
        self, stage: int, slowest: dict[int, float], bound: float
    ) -> tuple[dict[int, float], dict[int, int]]:
        """Extends every reached end by one stage.

        Returns:
            The slowest stage so far for each new end, and the best start of the new stage for each.
        """
        boundary, num_later = self.boundary[stage], self.num_stages - stage - 1
        # the later stages take at least a layer each, and at most the bound
        earliest = bisect_left(self.until, self.until[-1] - num_later * bound)
        latest = self.num_layers - num_later
        extended: dict[int, float] = {}
        starts: dict[int, int] = {}
        settled = earliest - 1  # ends up to here need no further start: too early, or as fast as can be
        for start, so_far in slowest.items():
            settled, furthest = max(settled, start), None
            for end in range(settled + 1, latest + 1):
                run_s = self.until[end] - self.until[start]
                if run_s > bound:
                    break  # every later end is slower still
                # below `balanced` nothing is gained, and equal values let the first start settle an end
                slowest_s = max(so_far, run_s + boundary[end - 1], self.balanced)
                if slowest_s > bound or slowest_s >= extended.get(end, inf):
                    continue
                if furthest is None:  # asks for memory only once a start has an end to offer, as that is the dear part
                    ends = range(end, self._last_in_time(stage, start, bound) + 1)
                    furthest = self._last_fitting(stage, start, ends)
                if end > furthest:
                    break
                extended[end], starts[end] = slowest_s, start
                if slowest_s == self.balanced and end == settled + 1:
                    settled = end
        return dict(sorted(extended.items())), starts


def _follow(starts: list[dict[int, int]], num_layers: int) -> Stages:
    """Returns the stages, read from the best start of the last one back to the first."""
    stages: list[tuple[int, int]] = []
    end = num_layers
    for chosen in reversed(starts):
        stages.append((chosen[end], end - 1))
        end = chosen[end]
    return tuple(reversed(stages))


def interleave(
    weights: Sequence[float], num_stages: int, bound: Bound, limit: float = inf, max_evaluations: int = MAX_EVALUATIONS
) -> Stages | None:
    """Cuts layers into stages so that their joint cost is least.

    Stages are added from the bottom, even ones first, and given up as soon as their bound reaches the best cost.

    Args:
        weights: The expected cost of each layer, which says where to look first.
        num_stages: Stages, each of at least one layer.
        bound: A cost that no completion of the lowest stages can be below; of all stages, their cost.
        limit: The cost to stay below.
        max_evaluations: Calls of ``bound`` after which the best so far is returned, so that a hopeless case ends.

    Returns:
        The first and last index of each stage, or ``None`` if nothing costs less than the limit.
    """
    search = _BranchAndBound(weights, num_stages, bound, limit, max_evaluations)
    search.extend(())
    return search.best


class _BranchAndBound:
    """The best stages so far, and the limit that it sets for others."""

    def __init__(
        self, weights: Sequence[float], num_stages: int, bound: Bound, limit: float, max_evaluations: int
    ) -> None:
        self.until = [0.0, *accumulate(weights)]
        self.num_layers, self.num_stages = len(weights), num_stages
        self.bound, self.limit, self.evaluations_left = bound, limit, max_evaluations
        self.best: Stages | None = None

    def extend(self, stages: Stages) -> None:
        """Tries all completions of the stages so far."""
        for longer in self._by_evenness(stages):
            if self.evaluations_left == 0:
                return
            self.evaluations_left -= 1
            cost = self.bound(longer)
            if cost >= self.limit:
                continue
            if len(longer) == self.num_stages:
                self.best, self.limit = longer, cost
            else:
                self.extend(longer)

    def _by_evenness(self, stages: Stages) -> Iterator[Stages]:
        """Yields the stages with one more; first those that leave as much to each later stage as the new one takes."""
        start = stages[-1][1] + 1 if stages else 0
        num_later = self.num_stages - len(stages) - 1
        even = self.until[start] + (self.until[-1] - self.until[start]) / (num_later + 1)
        latest = self.num_layers - num_later
        ends = range(start + 1, latest + 1) if num_later else [self.num_layers]
        for end in sorted(ends, key=lambda end: abs(self.until[end] - even)):
            yield (*stages, (start, end - 1))

"""The exact assignment of layers to devices that hold several stages each, by branch and bound."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf

from pipetransformer.autopipe.plan import Stages

Bound = Callable[[Stages], float]
MAX_EVALUATIONS = 500


def interleave(
    weights: Sequence[float], num_stages: int, bound: Bound, limit: float = inf, most_looks: int = MAX_EVALUATIONS
) -> Stages | None:
    """Cuts layers into stages so that their joint cost is least.

    What stages of one device cost together does not split into costs of stages, so that no dynamic programme finds it.
    Stages are added from the bottom, even ones first, and given up as soon as their bound says so.

    Args:
        weights: What each layer is expected to cost; where to look first.
        num_stages: Stages, each of at least one layer.
        bound: A cost that no completion of the stages so far can be below; of all stages, their cost.
        limit: Only what costs less.
        most_looks: Calls of ``bound`` after which the best so far is taken, so that a hopeless case ends.

    Returns:
        The first and last index of each stage, or ``None`` if nothing costs less than the limit.
    """
    search = _BranchAndBound(weights, num_stages, bound, limit, most_looks)
    search.extend(())
    return search.best


class _BranchAndBound:
    def __init__(self, weights: Sequence[float], num_stages: int, bound: Bound, limit: float, most_looks: int) -> None:
        self.until = [0.0, *accumulate(weights)]
        self.num_layers, self.num_stages = len(weights), num_stages
        self.bound, self.limit, self.looks_left = bound, limit, most_looks
        self.best: Stages | None = None

    def extend(self, runs: Stages) -> None:
        """Tries all completions of the stages so far."""
        for longer in self._by_evenness(runs):
            if self.looks_left == 0:
                return
            self.looks_left -= 1
            cost = self.bound(longer)
            if cost >= self.limit:
                continue
            if len(longer) == self.num_stages:
                self.best, self.limit = longer, cost
            else:
                self.extend(longer)

    def _by_evenness(self, runs: Stages) -> Iterator[Stages]:
        """With one stage more; first those that leave as much to each later stage as they take."""
        start = runs[-1][1] + 1 if runs else 0
        num_later = self.num_stages - len(runs) - 1
        even = self.until[start] + (self.until[-1] - self.until[start]) / (num_later + 1)
        latest = self.num_layers - num_later
        ends = range(start + 1, latest + 1) if num_later else [self.num_layers]
        for end in sorted(ends, key=lambda end: abs(self.until[end] - even)):
            yield (*runs, (start, end - 1))

"""A few rows in which every two settings meet that can meet."""

import random
from collections.abc import Callable, Sequence
from itertools import combinations, product

Row = tuple[object, ...]
Pair = tuple[int, object, int, object]
NUM_CANDIDATES = 150


def pairs_of(row: Row) -> list[Pair]:
    """In order, so that the same rows come out of every process."""
    return [(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)]


def pairwise(factors: Sequence[Sequence[object]], is_possible: Callable[[Row], bool]) -> list[Row]:
    """Rows that cover every pair that some possible row has, greedily and always the same ones.

    Args:
        factors: The settings of each factor.
        is_possible: Whether a whole row makes sense.
    """
    generator = random.Random(0)
    by_pair: dict[Pair, list[Row]] = {}
    for row in filter(is_possible, product(*factors)):
        for pair in pairs_of(row):
            by_pair.setdefault(pair, []).append(row)
    rows: list[Row] = []
    missing = dict.fromkeys(by_pair)  # in the order of the factors
    while missing:
        rows_of_one = by_pair[next(iter(missing))]
        candidates = generator.sample(rows_of_one, min(NUM_CANDIDATES, len(rows_of_one)))
        best = max(candidates, key=lambda row: sum(pair in missing for pair in pairs_of(row)))
        rows.append(best)
        for pair in pairs_of(best):
            missing.pop(pair, None)
    return rows

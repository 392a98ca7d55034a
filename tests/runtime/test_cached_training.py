"""Design promise 6: with the cache a training is what it is without, wherever the features lie, or if they do not."""

from pathlib import Path

import pytest
from support.cases import Case
from support.exactness import assert_equal
from support.loans import EVENTS, PLANS, train_with_loans
from support.mutations import CACHED_MUTATIONS, train_mutated
from support.plans import HEAD, plan, sharded
from support.pool import Pool
from support.trainings import Plans, Trace, train_elastic, train_reference

# three advances, a thaw to a lower level and one to none, over as many ranks
ALONE: Plans = {
    0: plan(0, 0, [HEAD], 1, 2),
    1: plan(1, 1, [HEAD], 1, 2),
    2: plan(3, 3, [HEAD], 1, 3),
    4: plan(5, 5, [HEAD], 1, 1),
    5: plan(2, 2, [HEAD], 1, 2),
    6: plan(1, 0, [HEAD], 1, 3),
}
TWO: Plans = {
    0: plan(0, 0, [3, HEAD], 1, 2),
    1: plan(2, 1, [4, HEAD], 1, 3),
    2: plan(3, 3, [5, HEAD], 1, 2, "gpipe"),
    4: plan(5, 5, [HEAD], 2, 2),
    5: plan(2, 2, [4, HEAD], 1, 2),
    6: plan(1, 0, [3, HEAD], 1, 2),
}
FOUR: Plans = {
    0: plan(0, 0, [1, 3, 5, HEAD], 1, 4),
    1: plan(2, 2, [4, 5, HEAD], 1, 3),  # the fourth rank is idle
    2: plan(3, 3, [5, HEAD], 2, 2),
    4: plan(5, 5, [HEAD], 4, 1),
    5: plan(2, 2, [5, HEAD], 2, 2),
    6: plan(1, 0, [3, HEAD], 2, 2),
}
SHARDED: Plans = {
    0: sharded(0, 0, 2, 1),
    1: sharded(2, 2, 2, 1),
    2: sharded(3, 3, 2, 2),
    4: sharded(5, 5, 2, 1),
    5: sharded(2, 2, 2, 2),
    6: sharded(1, 0, 2, 1),
}
SEQUENCES = {"1": (1, ALONE), "2": (2, TWO), "4": (4, FOUR), "2, sharded": (2, SHARDED)}
SHARES = {"memory": (1.0, 0.0), "disk": (0.0, 1.0), "a third each, and none": (1 / 3, 1 / 3)}


def reference(case: Case, plans: Plans) -> Trace:
    return train_reference(case, {step: one.num_frozen for step, one in plans.items()})


@pytest.mark.thinned("1-a third", "4-a third", "2, sharded")
@pytest.mark.parametrize(
    ("sequence", "shares", "kind"),
    [
        ("1", "a third each, and none", "vit"),
        ("2", "disk", "bert_qa"),
        ("2", "a third each, and none", "vit"),
        ("4", "memory", "bert_qa"),
        ("4", "a third each, and none", "bert_qa"),
        ("4", "disk", "vit"),
        ("2, sharded", "disk", "bert_qa"),
    ],
)
def test_a_cached_run_is_the_run_without_a_cache(
    sequence: str, shares: str, kind: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    world, plans = SEQUENCES[sequence]
    case = Case(kind, bert_config, dropout=0.1, cache_shares=SHARES[shares])
    traces = pool.run(world, train_elastic, case, plans, str(tmp_path))
    assert_equal(traces[0], reference(case, plans))
    assert list(tmp_path.iterdir()) == [], "what lay on disk is gone"


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mutation", ["features lose precision in the cache", *CACHED_MUTATIONS])
def test_a_broken_cache_does_not_pass_for_exact(mutation: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config, cache_shares=SHARES["a third each, and none"])
    mutated = pool.run(2, train_mutated, mutation, case, TWO, str(tmp_path))[0]
    with pytest.raises(AssertionError):
        assert_equal(mutated, reference(case, TWO))


@pytest.mark.parametrize("event", EVENTS)
def test_layers_that_are_borrowed_for_missing_samples_stay_as_long_as_they_are_used(
    event: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case("bert", bert_config, dropout=0.2, cache_shares=(1 / 2, 0.0))
    trace = pool.run(2, train_with_loans, case, event, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {step: plan.num_frozen for step, plan in PLANS.items()}))

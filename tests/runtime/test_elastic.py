"""Design promises 1 and 3: any topology and any transition, the same mathematics as one process."""

from pathlib import Path

import pytest
from support.cases import Case
from support.exactness import assert_equal
from support.mutations import MUTATIONS, train_mutated
from support.plans import HEAD, PIPE_TO_DATA, plan
from support.pool import Pool
from support.trainings import Plans, Trace, train_elastic, train_reference

UNCACHED: Plans = {  # a frozen stage below a trainable one, both schedules
    0: plan(0, 0, [1, 3, 5, HEAD], 1, 2, "gpipe"),
    2: plan(3, 0, [1, 4, 5, HEAD], 1, 4, "1f1b"),
    4: plan(5, 0, [4, HEAD], 2, 2, "gpipe"),
    5: plan(5, 0, [2, 4, 5, HEAD], 1, 4),
    6: plan(6, 0, [HEAD], 3, 1),
}
TWO_RANKS: Plans = {
    0: plan(0, 0, [3, HEAD], 1, 3),
    3: plan(2, 2, [HEAD], 2, 2),
    5: plan(6, 6, [HEAD], 2, 1),
}
ONE_RANK: Plans = {0: plan(0, 0, [HEAD], 1, 1), 2: plan(1, 0, [HEAD], 1, 3), 4: plan(3, 3, [HEAD], 1, 2)}
IDLE_RANK: Plans = {0: plan(0, 0, [2, 4, HEAD], 1, 3), 3: plan(3, 3, [5, HEAD], 1, 2), 5: plan(4, 4, [HEAD], 3, 1)}
SEQUENCES = {
    "4 stages, 2, 1": (4, PIPE_TO_DATA),
    "frozen stage below": (4, UNCACHED),
    "2 stages, 1": (2, TWO_RANKS),
    "1 process": (1, ONE_RANK),
    "3 stages, 2 and an idle rank, 1": (3, IDLE_RANK),
}


def run_both(pool: Pool, case: Case, world: int, plans: Plans, folder: Path) -> tuple[Trace, Trace]:
    elastic = pool.run(world, train_elastic, case, plans, str(folder))
    assert all(trace.losses == elastic[0].losses for trace in elastic), "every rank sees the same loss"
    return elastic[0], train_reference(case, {step: plan.num_frozen for step, plan in plans.items()})


@pytest.mark.thinned
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_every_topology_trains_as_one_process_does(
    kind: str, sequence: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    world, plans = SEQUENCES[sequence]
    assert_equal(*run_both(pool, Case(kind, bert_config), world, plans, tmp_path))


@pytest.mark.thinned("2 stages")
@pytest.mark.parametrize("sequence", ["2 stages, 1", "frozen stage below"])
def test_a_model_whose_layers_return_strided_tensors_trains_in_a_pipeline(
    sequence: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case, (world, plans) = Case("vit_pooled", bert_config), SEQUENCES[sequence]
    first = case.stack()[0]
    assert not first(case.split().inputs([0, 1], None)).is_contiguous()
    assert_equal(*run_both(pool, case, world, plans, tmp_path))


@pytest.mark.thinned("bert")
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_dropout_is_the_same_at_every_topology(kind: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case(kind, bert_config, dropout=0.2)
    elastic, reference = run_both(pool, case, 4, PIPE_TO_DATA, tmp_path)
    assert_equal(elastic, reference)
    assert elastic.losses != train_reference(Case(kind, bert_config), {}).losses, "dropout must have done something"


def test_momentum_survives_the_transitions(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    assert_equal(*run_both(pool, Case("vit", bert_config, optimizer="sgd"), 4, PIPE_TO_DATA, tmp_path))


UNEVEN: Plans = {  # shares of 8 over 3 replicas are padded; the prefix runs uncached, then from the cache
    0: plan(0, 0, [3, HEAD], 1, 2),
    2: plan(2, 0, [4, HEAD], 2, 3),
    4: plan(4, 4, [HEAD], 3, 2),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_feature_does_not_pass_for_exact(mutation: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config, dropout=0.2)
    mutated = pool.run(4, train_mutated, mutation, case, UNEVEN, str(tmp_path))[0]
    reference = train_reference(case, {step: plan.num_frozen for step, plan in UNEVEN.items()})
    with pytest.raises(AssertionError):
        assert_equal(mutated, reference)


def test_uneven_shares_and_an_uncached_prefix_are_exact(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    """The plans of the mutations, unbroken."""
    assert_equal(*run_both(pool, Case("vit", bert_config, dropout=0.2), 4, UNEVEN, tmp_path))

"""Design promise 1 for losses by token: a step takes the mean over the tokens of the global batch that count."""

from pathlib import Path

import pytest
from support.cases import Case
from support.exactness import assert_equal
from support.mutations import TOKEN_MUTATIONS, train_mutated
from support.plans import HEAD, PIPE_TO_DATA, plan, sharded
from support.pool import Pool
from support.trainings import Plans, train_elastic, train_reference

SHARDED: Plans = {0: sharded(0, 0, 2, 1), 2: sharded(2, 2, 2, 2), 4: sharded(4, 4, 2, 1)}
ALONE: Plans = {0: plan(0, 0, [HEAD], 1, 8), 2: plan(2, 2, [HEAD], 1, 3), 4: plan(4, 4, [HEAD], 1, 1)}
SEQUENCES = {"4": (4, PIPE_TO_DATA, 1 / 2), "2, sharded": (2, SHARDED, 1.0), "1": (1, ALONE, 1 / 2)}


def case(kind: str, folder: Path, share: float = 1 / 2) -> Case:
    """A part of the features is computed again where the cache holds only a share of them."""
    return Case(kind, folder, dropout=0.1, cache_shares=(share, 0.0))


def frozen(plans: Plans) -> dict[int, int]:
    return {step: one.num_frozen for step, one in plans.items()}


@pytest.mark.thinned("gpt2-4", "bert_tags-2", "bert_tags-1")
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("kind", ["bert_tags", "gpt2"])
def test_all_arrangements_take_the_mean_over_the_same_tokens(
    kind: str, sequence: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    world, plans, share = SEQUENCES[sequence]
    trace = pool.run(world, train_elastic, case(kind, bert_config, share), plans, str(tmp_path))[0]
    assert_equal(trace, train_reference(case(kind, bert_config), frozen(plans)))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mutation", TOKEN_MUTATIONS)
@pytest.mark.parametrize("kind", ["bert_tags", "gpt2"])
def test_means_over_anything_else_do_not_pass_for_exact(
    kind: str, mutation: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    mutated = pool.run(4, train_mutated, mutation, case(kind, bert_config), PIPE_TO_DATA, str(tmp_path))[0]
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(mutated, train_reference(case(kind, bert_config), frozen(PIPE_TO_DATA)))


def test_one_text_of_a_batch_may_have_no_token_that_counts(bert_config: Path) -> None:
    weights = case("bert_tags", bert_config).split().loss_weights
    assert weights is not None
    assert min(weights) == 0
    assert max(weights) > 5

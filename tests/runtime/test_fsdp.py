"""Design promises 1 and 3 where every rank keeps a shard of each layer."""

from pathlib import Path

import pytest
from support.cases import NUM_CLASSES, Case
from support.exactness import assert_equal
from support.memory import Started, start
from support.meshes import train_beside_other_groups
from support.mutations import train_mutated
from support.observations import poisoned_step
from support.plans import HEAD, sharded
from support.pool import Pool
from support.shards import Held, held_bytes
from support.trainings import Plans, Trace, train_elastic, train_reference

from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel


def plans(world: int, cached: bool, recompute: bool, microbatches: int) -> Plans:
    """Freezes half of the blocks, then all of them."""
    frozen = {0: 0, 2: 3, 5: 6}
    return {
        step: sharded(blocks, blocks if cached else 0, world, microbatches, recompute)
        for step, blocks in frozen.items()
    }


def run_both(pool: Pool, case: Case, world: int, plans: Plans, folder: Path) -> tuple[Trace, Trace]:
    traces = pool.run(world, train_elastic, case, plans, str(folder))
    assert all((trace.losses, trace.norms) == (traces[0].losses, traces[0].norms) for trace in traces)
    return traces[0], train_reference(case, {step: plan.num_frozen for step, plan in plans.items()})


@pytest.mark.thinned("2-bert_qa", "3-vit", "2-bert_mlm")
@pytest.mark.parametrize(
    ("world", "kind", "optimizer", "cached", "recompute", "microbatches"),
    [
        (1, "vit", "adamw", False, True, 2),
        (1, "bert", "lamb", True, False, 1),
        (2, "bert_qa", "lamb", True, True, 1),
        (3, "vit", "lamb", True, False, 2),
        (4, "vit", "sgd", True, True, 1),
        (2, "bert_mlm", "adamw", False, False, 2),  # with a weight that layers share
    ],
)
def test_shards_train_as_one_process_does(
    world: int, kind: str, optimizer: str, cached: bool, recompute: bool, microbatches: int, pool: Pool,
    bert_config: Path, tmp_path: Path,
) -> None:  # fmt: skip
    case = Case(kind, bert_config, 0.2, optimizer)  # of an epoch of 20 samples the last batch of 8 is smaller
    assert_equal(*run_both(pool, case, world, plans(world, cached, recompute, microbatches), tmp_path))


def test_a_second_run_of_a_process_uses_no_group_of_the_first(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    """DTensor keeps what it has computed for an equal mesh, groups included."""
    case, sequence = Case("vit", bert_config, 0.2), plans(2, cached=False, recompute=False, microbatches=1)
    reference = train_reference(case, {step: plan.num_frozen for step, plan in sequence.items()})
    for train in (train_elastic, train_beside_other_groups):
        assert_equal(pool.run(2, train, case, sequence, str(tmp_path / train.__name__))[0], reference)


def test_a_layer_that_thaws_trains_again(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    sequence = {0: sharded(3, 0, 2, 1), 2: sharded(6, 6, 2, 1), 4: sharded(1, 0, 2, 2), 6: sharded(0, 0, 2, 1)}
    assert_equal(*run_both(pool, Case("vit", bert_config, 0.2), 2, sequence, tmp_path))


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    "mutation",
    [
        "norms are those of the part that a rank has",
        "optimizer state stays behind",
        "dropout depends on the rank",
        "the frozen prefix draws dropout",
    ],
)
def test_a_broken_feature_does_not_pass_for_exact(mutation: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case, sequence = Case("vit", bert_config, 0.2), plans(2, cached=False, recompute=False, microbatches=2)
    mutated = pool.run(2, train_mutated, mutation, case, sequence, str(tmp_path))[0]
    reference = train_reference(case, {step: plan.num_frozen for step, plan in sequence.items()})
    with pytest.raises(AssertionError):
        assert_equal(mutated, reference)


def test_a_loss_that_is_not_finite_stops_every_rank_before_any_weight_changes(
    pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    results = pool.run(2, poisoned_step, Case("vit", bert_config), {0: sharded(0, 0, 2, 2)}, str(tmp_path))
    assert all("nan" in message and unchanged for message, unchanged in results)


def test_every_rank_keeps_its_share_of_weights_gradients_and_moments(pool: Pool, bert_config: Path) -> None:
    case = Case("bert", bert_config)
    seen: list[Held] = pool.run(4, held_bytes, case, sharded(0, 0, 4, 2))
    stack = case.stack()
    whole = sum(parameter.nbytes for parameter in stack.parameters())
    share = whole / 4 + sum(parameter[0].nbytes for parameter in stack.parameters())  # made of whole rows
    assert sum(own.weights for own in seen) >= whole
    for own in seen:
        assert max(own.weights, own.gradients, own.moments / 2) <= share


def test_a_rank_loads_and_shards_one_layer_at_a_time(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    BertForSequenceClassification(BertConfig.from_pretrained(bert_config, num_labels=NUM_CLASSES)).save_pretrained(
        tmp_path
    )
    seen: list[Started] = pool.run(2, start, Case("bert", bert_config), tmp_path, NUM_CLASSES, sharded(0, 0, 2, 1))
    stack = HuggingFaceModel(name=str(tmp_path)).build_meta(Head("sequence", NUM_CLASSES), (), 0)
    largest = max(sum(tensor.nbytes for _, tensor in stack[layer].tensors()) for layer in range(len(stack)))
    buffers = sum(buffer.nbytes for buffer in stack.buffers())
    for own in seen:
        assert largest <= own.most_bytes <= largest + buffers
        assert own.held == list(range(HEAD + 1))

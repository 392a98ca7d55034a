"""Replicas average the rows of an embedding that a batch touches, and that is the mean of the whole gradient."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import Case
from support.embeddings import (
    MUTATIONS,
    NUM_ROWS,
    ON_A_MESH,
    WIDTH,
    averaged,
    gradient_of,
    train_counted,
    train_mutated,
)
from support.exactness import assert_equal
from support.mixed import measured_layers
from support.plans import HEAD, plan
from support.pool import Pool
from support.trainings import Plans, train_elastic, train_reference
from torch import nn

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.memory import BUCKET_BYTES
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.mesh import StageMesh
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime.embedding_gradients import embedding_weights, touched_rows, untouched_bytes

LARGE = 8200  # rows of 16 numbers of 8 bytes: just above a bucket
PLANS: Plans = {
    0: plan(0, 0, [HEAD], 4, 1),
    2: plan(0, 0, [3, HEAD], 2, 2),
    4: plan(0, 0, [HEAD], 2, 2),
    5: plan(1, 0, [HEAD], 4, 1),  # the embedding is frozen
}
ON_MESHES: Plans = {
    0: replace(plan(0, 0, [HEAD], 1, 1), mesh=StageMesh(cp=4)),
    2: replace(plan(0, 0, [HEAD], 2, 2), mesh=StageMesh(cp=2)),
    4: replace(plan(0, 0, [HEAD], 2, 1), mesh=StageMesh(tp=2)),
    5: plan(1, 0, [HEAD], 4, 1),
}
FROZEN = {step: plan.num_frozen for step, plan in PLANS.items()}


def large(folder: Path) -> Case:
    return Case("bert", folder, dropout=0.2, vocabulary=LARGE)


def test_a_model_with_a_large_embedding_trains_as_one_process_does(
    pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    (trace, by_rows), *_ = pool.run(4, train_counted, large(bert_config), PLANS, str(tmp_path))
    assert_equal(trace, train_reference(large(bert_config), FROZEN))
    assert by_rows == 5, "in each step with replicas until the embedding freezes"


def test_copies_of_a_large_embedding_on_a_mesh_get_the_sum_of_their_rows(
    pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    trace = pool.run(4, train_elastic, large(bert_config), ON_MESHES, str(tmp_path))[0]
    assert_equal(trace, train_reference(large(bert_config), FROZEN))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_mean_of_rows_does_not_pass_for_exact(
    mutation: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    plans = ON_MESHES if mutation == ON_A_MESH else PLANS
    mutated = pool.run(4, train_mutated, mutation, large(bert_config), plans, str(tmp_path))[0]
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(mutated, train_reference(large(bert_config), FROZEN))


@pytest.mark.parametrize(
    ("rows", "expected_sizes"),
    [
        ([[3, 7], [5, 7]], [NUM_ROWS, 3 * WIDTH]),
        ([[], []], [NUM_ROWS, 0]),
        ([[], [99]], [NUM_ROWS, WIDTH]),
        ([[*range(30)], [*range(30, 51)]], [NUM_ROWS, NUM_ROWS * WIDTH]),  # more than half: all at once
    ],
    ids=["some", "none", "of one rank", "most"],
)
def test_only_rows_that_a_rank_touched_are_sent(rows: list[list[int]], expected_sizes: list[int], pool: Pool) -> None:
    results = pool.run(2, averaged, rows)
    mean = (gradient_of(0, rows[0]) + gradient_of(1, rows[1])) / 2
    for gradient, sizes in results:
        torch.testing.assert_close(gradient, mean)
        assert torch.equal(gradient, results[0][0]), "bit for bit on every rank"
        assert sizes == expected_sizes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_reaches_every_rank(value: float, pool: Pool) -> None:
    for gradient, _ in pool.run(2, averaged, [[3], [5]], value):
        assert not gradient[3, 1].isfinite()
        assert gradient[5].isfinite().all()


@given(st.lists(st.lists(st.sampled_from([0.0, -0.0, 1e-300, -1.0, 2.0, float("nan")]), min_size=2, max_size=2)))
def test_a_row_counts_as_touched_where_any_number_is_not_zero(rows: list[list[float]]) -> None:
    expected = [any(number != 0 for number in row) for row in rows]
    assert touched_rows(torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)).tolist() == expected


def stack_of(embedding: nn.Module, head: nn.Module) -> LayerStack:
    layers = (embedding, nn.Linear(16, 16), head)
    return LayerStack([Layer(layer, nn.Module.__call__) for layer in layers], lambda x: torch.Size(x.shape))


def test_large_embeddings_that_no_other_layer_shares_are_averaged_by_rows() -> None:
    num_rows = BUCKET_BYTES // 4 // 16  # of 16 numbers of 4 bytes
    table, head = nn.Embedding(num_rows, 16), nn.Linear(16, num_rows)
    plain = stack_of(nn.Sequential(table, nn.Linear(16, num_rows)), head)
    assert [len(weight) for weight in embedding_weights(plain, 0)] == [num_rows], "and not the linear layer"
    assert embedding_weights(plain, 2) == []
    assert embedding_weights(stack_of(nn.Embedding(num_rows - 1, 16), head), 0) == [], "a bucket has room for it"
    table.weight.requires_grad_(False)
    assert embedding_weights(plain, 0) == []
    table.weight.requires_grad_(True)
    head.weight = table.weight
    assert embedding_weights(stack_of(table, head), 0) == [], "the head gives every row a gradient"


def test_bytes_that_are_not_sent_are_those_of_rows_that_no_batch_touches() -> None:
    weight = nn.Parameter(torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64))
    weight.grad = gradient_of(0, [2, 3, 4, 5, 9, 20, 30, 40, 50, 60])
    row = 8 * WIDTH
    assert untouched_bytes([weight], 1) == (NUM_ROWS - 10) * row
    assert untouched_bytes([weight], 4) == pytest.approx((NUM_ROWS - 40) * row)
    assert untouched_bytes([weight], 6) == 0, "most rows are touched, and the whole gradient is sent"


def test_an_embedding_that_a_batch_does_not_use_sends_nothing() -> None:
    weight = nn.Parameter(torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64))
    assert untouched_bytes([weight], 2) == weight.nbytes


def test_a_profile_counts_the_rows_that_replicas_sum(pool: Pool, bert_config: Path) -> None:
    case = large(bert_config)
    for layers in pool.run(2, measured_layers, case):
        embedding, *others = layers
        tokens = case.split().inputs([*range(4)], 12).unique()  # the same large batch on both ranks
        tokens = tokens[tokens != 0]  # padding has no gradient
        untouched = embedding.trainable_bytes - embedding.summed_bytes
        assert untouched == pytest.approx((LARGE - 2 * len(tokens)) * 16 * 8)
        assert all(layer.summed_bytes == layer.trainable_bytes for layer in others)


def test_an_all_reduce_is_predicted_by_the_rows_that_are_sent() -> None:
    layer = LayerProfile(
        "layer", *[AffineTime(0, 1)] * 3, 0.0, parameter_bytes=1000, activation_bytes=0, output_bytes=1
    )
    cluster = Cluster(2, None, Link(0.0, 1.0))
    replicas = Plan(0, 0, ((0, 3),), num_replicas=2, num_microbatches=1)
    whole = Profile((layer,) * 4, 2)
    by_rows = replace(whole, layers=(replace(layer, untouched_bytes=900), *whole.layers[1:]))
    assert step_seconds(whole, cluster, replicas, 2) - step_seconds(by_rows, cluster, replicas, 2) == 900

"""Packed rows hold each document once, and train as rows of single documents do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.by_token import prompted_texts
from support.cases import Case
from support.exactness import assert_equal
from support.plans import HEAD, PIPE_TO_DATA, plan
from support.pool import Pool
from support.trainings import Plans, train_elastic, train_reference

from pipetransformer.autodp.sampler import pack
from pipetransformer.autodp.topology import Topology
from pipetransformer.data.token_tasks import IGNORED
from pipetransformer.training.loader import BatchLoader
from pipetransformer.training.packing import packed_rows

CAPACITY = 16
ALONE: Plans = {0: plan(0, 0, [HEAD], 1, 1), 2: plan(2, 0, [HEAD], 1, 2), 4: plan(2, 2, [HEAD], 1, 1)}


@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40))
def test_each_document_is_in_one_pack_and_no_pack_is_too_long(lengths: list[int]) -> None:
    packs = pack(np.array(lengths), CAPACITY)
    assert sorted(np.concatenate(packs).tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= CAPACITY for members in packs)
    assert len(packs) <= 11 / 9 * -(-sum(lengths) // CAPACITY) * 2 + 1, "no two packs are half empty"
    assert sum(2 * sum(lengths[index] for index in members) <= CAPACITY for members in packs) <= 1


@given(
    lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=12),
    num_replicas=st.integers(1, 3),
    num_microbatches=st.integers(1, 3),
)
def test_replicas_have_rows_of_one_shape_and_each_document_once(
    lengths: list[int], num_replicas: int, num_microbatches: int
) -> None:
    ids, whole = np.arange(len(lengths)), plan(0, 0, [HEAD], num_replicas, num_microbatches)
    parts = [
        packed_rows(ids, np.array(lengths), CAPACITY, Topology(whole, rank), step_of_width=8)
        for rank in range(num_replicas)
    ]
    assert len({(len(part), part.width) for part in parts}) == 1
    assert len(parts[0]) % num_microbatches == 0
    real = [part.documents[part.weights[part.row] > 0] for part in parts]
    assert sorted(np.concatenate(real).tolist()) == ids.tolist()


def test_documents_stand_one_after_the_other_with_positions_of_their_own() -> None:
    whole = Topology(plan(0, 0, [HEAD], 1, 1), 0)
    rows = packed_rows(np.array([3, 0, 1, 2]), np.array([2, 3, 2, 5]), 5, whole, step_of_width=1)
    laid_out = rows.scatter(torch.tensor([[1] * 5, [2] * 5, [3] * 5, [4] * 5]), 0)
    assert rows.documents.tolist() == [3, 1, 0, 2]
    assert laid_out.tolist() == [[1, 1, 1, 1, 1], [2, 2, 2, 3, 3], [4, 4, 0, 0, 0]]
    context = rows.context()
    assert context["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert context["attention_mask"].tolist() == [[True] * 5, [True] * 5, [True, True, False, False, False]]
    assert rows.first_documents.tolist() == [3, 1, 2]


def test_a_packed_batch_has_the_targets_of_its_documents_and_their_divisor() -> None:
    split = prompted_texts(20)
    split.row_length = CAPACITY
    ids, whole = np.arange(8), Topology(plan(0, 0, [HEAD], 1, 1), 0)
    loader = BatchLoader.uncached(split, lambda inputs: torch.Size((*inputs.shape, 4)), seed=1)
    batch = loader.batch(ids, whole)
    assert split.loss_weights is not None
    assert batch.targets is not None
    assert batch.loss_divisor == split.loss_weights[ids].sum() == int((batch.targets != IGNORED).sum())
    assert len(batch) < len(ids) == len(batch.ids)


@pytest.mark.thinned("alone-gemma3_text", "pipeline-gpt2")
@pytest.mark.parametrize("kind", ["gpt2", "gemma3_text"])
@pytest.mark.parametrize(("world", "plans"), [(1, ALONE), (4, PIPE_TO_DATA)], ids=["alone", "pipeline"])
def test_packs_train_as_single_documents_do_at_every_arrangement_frozen_and_cached(
    kind: str, world: int, plans: Plans, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case(kind, bert_config, row_length=CAPACITY, kernels="wide norms")
    frozen = {step: one.num_frozen for step, one in plans.items()}
    trace = pool.run(world, train_elastic, case, plans, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, frozen))

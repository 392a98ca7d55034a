"""A batch carries all that the loss of its step needs, so that a schedule can be used again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from support.cases import Case
from support.exactness import assert_equal
from support.plans import HEAD, plan
from support.pool import Pool
from support.trainings import train_elastic, train_reference

from pipetransformer.runtime.batch import Batch

BATCH = Batch(
    ids=np.array([7, 3, 7]),
    inputs=None,
    context={},
    targets=torch.tensor([[1, 2], [3, 2**53], [1, 2]]),
    weights=torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64),
    keys=torch.zeros(3, dtype=torch.int32),
    hidden_shape=(3, 4, 5),
    loss_divisor=2.0,
)


def test_targets_weights_and_the_factor_travel_in_one_tensor() -> None:
    expected = [[1, 2, 1, 0.25], [3, 2**53, 1, 0.25], [1, 2, 0, 0.25]]
    assert torch.equal(BATCH.loss_targets(0.25), torch.tensor(expected, dtype=torch.float64))
    assert replace(BATCH, targets=None).loss_targets(0.25) is None


def test_a_batch_of_the_same_shape_is_divided_by_its_own_number_of_samples(
    pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """Epochs of 23 samples end with a batch of 7, which three replicas pad to the shape of the batches of 8."""
    case = Case("vit", bert_config, num_samples=23)
    plans = {0: plan(0, 0, [HEAD], 3, 1), 3: plan(0, 0, [1, 4, HEAD], 1, 4)}
    assert_equal(pool.run(3, train_elastic, case, plans, str(tmp_path))[0], train_reference(case, {0: 0}))

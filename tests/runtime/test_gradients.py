"""Gradients of a pipeline's replicas become their mean, whatever their size and layout."""

import pytest
import torch
from support.means import SHAPES, averaged
from support.pool import Pool

from pipetransformer.autopipe.memory import BUCKET_BYTES
from pipetransformer.runtime.gradients import _buckets


@pytest.mark.parametrize("world", [1, 3])
def test_every_gradient_becomes_the_mean_and_none_stays_none(world: int, pool: Pool) -> None:
    for gradients, mean_rank in pool.run(world, averaged):
        for number, shape in enumerate(SHAPES):
            torch.testing.assert_close(gradients[number], torch.full(shape, number + mean_rank, dtype=torch.float64))
        assert gradients[len(SHAPES)] is None


def test_small_gradients_travel_together_as_long_as_they_fit() -> None:
    third = torch.zeros(BUCKET_BYTES // 3, dtype=torch.uint8)
    large = torch.zeros(2 * BUCKET_BYTES, dtype=torch.uint8)
    assert [len(pack) for pack in _buckets([third] * 7)] == [3, 3, 1]
    assert [len(pack) for pack in _buckets([third, large, third])] == [1, 1, 1]
    assert list(_buckets([])) == []

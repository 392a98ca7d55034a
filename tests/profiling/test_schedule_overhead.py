"""What a pipeline costs besides its layers is measured once, and is the same on every rank."""

import pytest
import torch
from support.pool import Pool

from pipetransformer.profiling.schedule_overhead import measure_pass

CPU = torch.device("cpu")


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_hears_the_same_time_of_a_pass(world: int, pool: Pool) -> None:
    seconds = pool.run(world, measure_pass, CPU)
    assert len(set(seconds)) == 1
    assert 0 < seconds[0] < 1


def test_one_rank_has_no_pipeline(pool: Pool) -> None:
    assert pool.run(1, measure_pass, CPU) == [0.0]

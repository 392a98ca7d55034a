"""Watches torch: the schedules that are refused over a frozen stage, and why."""

import pytest
import torch
from support.pool import Pool
from support.zero_bubble import stages_without_gradient
from torch.torch_version import TorchVersion


def test_interleaved_1f1b_gives_every_trainable_stage_its_gradient(pool: Pool) -> None:
    assert pool.run(2, stages_without_gradient, "interleaved1f1b") == [[], []]


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13", reason="torch before 2.13 sends a gradient to every stage"
)
def test_zero_bubble_schedules_still_forget_the_first_trainable_stage(pool: Pool) -> None:
    forgotten = pool.run(2, stages_without_gradient, "interleaved_zero_bubble")
    assert forgotten == [[], [1]], "torch has mended it: take the schedule out of REFUSED and offer it"

"""Activation checkpointing takes more than a second forward pass, and that is measured on short passes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipetransformer.profiling import passes
from pipetransformer.profiling.memory import AutocastCopies
from pipetransformer.profiling.passes import LONG_PASS_S, _checkpointing_seconds
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.rng import sample_keys

IDS = np.arange(2)
LOSS_S = LONG_PASS_S / 16
BATCH = Batch(IDS, torch.ones(2, 3), {}, torch.zeros(2), torch.ones(2), sample_keys(0, 0, IDS), (2, 3), 2.0)


class Counted:
    """A layer that counts its forward passes."""

    draws_by_sample = False

    def __init__(self) -> None:
        self.module: nn.Module = nn.Linear(3, 3)
        self.num_forwards = self.num_losses = 0

    def __call__(self, x: Tensor, _: Batch) -> Tensor:
        self.num_forwards += 1
        return self.module(x)

    def loss(self, output: Tensor, _: Batch) -> Tensor:
        self.num_losses += 1
        return output.square().sum()


@pytest.mark.parametrize("forward_s", [LONG_PASS_S / 8, 2 * LONG_PASS_S], ids=["a short pass", "a long pass"])
def test_what_checkpointing_takes_is_told_from_the_second_forward_pass(
    forward_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, hooks_s = Counted(), LONG_PASS_S / 64

    def made_up(function: Callable[[], Any], _: torch.device) -> tuple[float, Any]:
        before, losses_before, result = runs.num_forwards, runs.num_losses, function()
        num_forwards, is_backward = runs.num_forwards - before, result is None
        return num_forwards * (forward_s + is_backward * hooks_s) + (runs.num_losses - losses_before) * LOSS_S, result

    monkeypatch.setattr(passes, "timed", made_up)
    x = torch.ones(2, 3)
    plain = [passes.passes(runs, x, BATCH, AutocastCopies(runs.module), wants_grad=True)()]
    assert plain[0].seconds == forward_s + LOSS_S, "backward runs nothing again"
    assert plain[0].loss_s == LOSS_S
    expected = 0.0 if forward_s > LONG_PASS_S else hooks_s
    assert _checkpointing_seconds(runs, x, BATCH, True, plain) == pytest.approx(expected)

"""Loops of the comparison with its peers, broken on purpose."""

from typing import Any
from unittest import mock

import torch

from experiments.peers import problem
from experiments.peers.agreement import losses

OwnRows = problem.OwnRows


class OwnMeans(OwnRows):
    """Has each rank take the mean over its own rows, as a loop does that does not know the global batch."""

    def __call__(self, global_ids: list[int]) -> dict[str, torch.Tensor]:
        batch = super().__call__(global_ids)
        return batch | {"divisor": batch["weights"].sum()}


def losses_by_own_means(*arguments: Any) -> dict[str, list[float]]:
    with mock.patch.object(problem, "OwnRows", OwnMeans):
        return losses(*arguments)

"""A stage sends contiguous tensors, forward and back, whatever its layers return."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.runtime.stage import Stage


class Transposed(nn.Module):
    """Works on (B, D, T), so that it returns a strided tensor and its input gets a strided gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("num_frozen", [0, 1])
@pytest.mark.parametrize("recompute", [False, True])
def test_outputs_and_gradients_are_contiguous(recompute: bool, num_frozen: int) -> None:
    layers: dict[int, nn.Module] = {index: Transposed() for index in range(2)}
    active = {index: list(layers[index].parameters()) for index in range(num_frozen, 2)}
    stage = Stage(layers, active, PRECISIONS["float64"], recompute)
    received = torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True)  # (B, T, D)

    output = stage(received, keys=torch.zeros(2, dtype=torch.int32))
    output.sum().backward()

    assert not layers[0](received).is_contiguous()
    assert output.is_contiguous()
    assert received.grad is not None
    assert received.grad.is_contiguous()

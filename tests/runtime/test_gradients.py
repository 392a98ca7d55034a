"""Gradients of a pipeline's replicas become their mean, whatever their size and layout, and are clipped."""

from typing import Any

import pytest
import torch
from support.means import SHAPES, averaged
from support.pool import Pool
from torch.utils._python_dispatch import TorchDispatchMode

from pipetransformer.autopipe.memory import BUCKET_BYTES
from pipetransformer.runtime.gradients import _buckets, unscale_and_clip


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


class _Copies(TorchDispatchMode):
    """Counts what is copied from the host to the device, which the host waits for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten._to_copy.default and result.device != args[0].device
        return result


@pytest.mark.parametrize(
    "total_norm", [3.0, torch.tensor(3.0, dtype=torch.float64, device="meta")], ids=["read", "not"]
)
def test_clipping_copies_no_number_to_the_device(total_norm: torch.Tensor | float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    parameter.grad = torch.zeros(2, device="meta")
    with _Copies() as copies:
        unscale_and_clip({0: [parameter]}, total_norm, 1.0, 2.0)
    assert copies.count == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_of_the_host_clips_as_one_of_the_device(dtype: torch.dtype) -> None:
    gradient = torch.randn(1000, dtype=dtype)
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    factor = unscale_and_clip({0: [parameter]}, 3.0, 1.0, 2.0) / 2.0
    assert torch.equal(parameter.grad, gradient * factor.to(dtype))
    (by_number,) = torch._foreach_mul([gradient], factor.item())
    assert torch.equal(parameter.grad, by_number)

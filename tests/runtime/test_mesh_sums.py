"""Numbers of 16 bits that the ranks of a mesh sum are rounded once, however many ranks there are."""

import pytest
import torch
from support.mesh_training import addend, sums_along_an_axis
from support.pool import Pool
from torch import Tensor

from pipetransformer.mesh import StageMesh

HALVES = (torch.bfloat16, torch.float16)


def unit(dtype: torch.dtype) -> float:
    """Half of the distance from 1 to the next number: the relative error of a rounding."""
    return torch.finfo(dtype).eps / 2


def is_rounded_once(total: Tensor, num_ranks: int) -> bool:
    """Whether a sum is within one rounding of the exact one, and those of float32 before it, in any order."""
    addends = torch.stack([addend(rank, tuple(total.shape), total.dtype) for rank in range(num_ranks)]).double()
    exact, float32 = addends.sum(0), num_ranks * unit(torch.float32) * addends.abs().sum(0)
    bound = unit(total.dtype) * (exact.abs() + float32) + float32
    return bool(((total.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", [(12, 5), (7, 3)], ids=["parts", "no parts"])
def test_a_sum_is_rounded_once(num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype, pool: Pool) -> None:
    """Copies of it are equal, and a rank's part is a part of it; what a rank adds stays as it is."""
    found = pool.run(num_ranks, sums_along_an_axis, StageMesh(tp=num_ranks), shape, dtype)
    whole = found[0][0]
    assert whole.dtype == dtype
    assert is_rounded_once(whole, num_ranks)
    for rank, (total, part, own) in enumerate(found):
        assert torch.equal(total, whole)
        assert (part is None) == bool(shape[0] % num_ranks)
        assert part is None or torch.equal(part, whole.chunk(num_ranks)[rank])
        assert torch.equal(own, addend(rank, shape, dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_sum_of_four_that_the_library_makes_is_not(dtype: torch.dtype, pool: Pool) -> None:
    """As ``parallel.reduce_dtype=precision`` asks for: it rounds in every addition."""
    mesh = StageMesh(tp=4, reduce_dtype="precision")
    for total, *_ in pool.run(4, sums_along_an_axis, mesh, (12, 5), dtype):
        assert not is_rounded_once(total, 4)


def test_wider_numbers_are_summed_as_they_are(pool: Pool) -> None:
    for dtype in (torch.float32, torch.float64):
        for total, *_ in pool.run(4, sums_along_an_axis, StageMesh(tp=4), (12, 5), dtype):
            addends = torch.stack([addend(rank, (12, 5), dtype) for rank in range(4)]).double()
            bound = 4 * unit(dtype) * addends.abs().sum(0)
            assert ((total.double() - addends.sum(0)).abs() <= bound).all()

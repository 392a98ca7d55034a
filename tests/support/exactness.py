"""When two trainings count as the same."""

import math
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from pipetransformer.runtime.precision import PRECISIONS
from support.cases import Case, tensors_equal
from support.trainings import Trace, train_reference

SAME_ROUNDING = 1 / 16  # in steps from one number to the next, see tests/runtime/test_precision.py


@dataclass(frozen=True)
class Apart:
    """Distance of two trainings, in steps from one 16-bit number to the next: 2^-7 (bfloat16) or 2^-10 (float16).

    Attributes:
        losses: Relative difference where it is largest.
        norms: The same of gradient norms.
        weights: Distance of all weights, over the way that they went.
    """

    losses: float
    norms: float
    weights: float

    def within(self, other: "Apart", times: float = 1.0) -> bool:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(own <= times * bound for own, bound in pairs)


def assert_equal(elastic: Trace, reference: Trace) -> None:
    """Losses, gradient norms, weights and optimizer state within 1e-10; copies of a shared weight bit for bit."""
    assert elastic.ties_hold
    torch.testing.assert_close(elastic.losses, reference.losses, rtol=0, atol=1e-10)
    torch.testing.assert_close(elastic.norms, reference.norms, rtol=0, atol=1e-10)
    tensors_equal({name: elastic.weights[name] for name in reference.weights}, reference.weights)
    tensors_equal(elastic.moments, reference.moments)


def assert_near(elastic: Trace, reference: Trace, case: Case, num_steps: float) -> None:
    """Asserts that losses, gradient norms and the way of all weights differ by so many steps at most."""
    apart = measure_apart(elastic, reference, case)
    assert apart.within(Apart(num_steps, num_steps, num_steps)), apart


def assert_as_near_as_one_process(
    elastic: Trace, case: Case, frozen: dict[int, int], num_microbatches: int, times: float = 2
) -> None:
    """Asserts that a training is not further from one process than twice what one process is from float64.

    Two trainings that are each so far from float64 may be twice that apart. How far one process is depends on the
    machine's kernels and is measured here, with micro-batches of several sizes.

    Args:
        num_microbatches: Of the training in one process to compare with.
        times: In place of twice.
    """
    exact = train_reference(replace(case, precision="float64", kernels=Case.kernels), frozen)
    alone = {count: train_reference(case, frozen, count) for count in (1, 2, 4, 8)}
    rounding = [astuple(measure_apart(trace, exact, case)) for trace in alone.values()]
    bound = Apart(*map(max, zip(*rounding, strict=True)))
    apart = measure_apart(elastic, alone[num_microbatches], case)
    assert apart.within(bound, times=times), f"{apart}, and one process is {bound} from float64"


def measure_apart(one: Trace, two: Trace, case: Case) -> Apart:
    """Measures the distance of two trainings of a case in mixed precision."""
    products = PRECISIONS[case.precision].compute_dtype
    assert products is not None
    begun = {name: tensor.detach() for layer in case.stack().layers for name, tensor in layer.tensors()}
    way = _distance(one.weights, two.weights) / _distance(begun, two.weights)
    relative = (_relative(one.losses, two.losses), _relative(one.norms, two.norms), way)
    return Apart(*(value / torch.finfo(products).eps for value in relative))


def _relative(one: list[float], two: list[float]) -> float:
    """Returns the largest relative difference; not a number where one of them is none."""
    difference = torch.tensor(one, dtype=torch.float64) / torch.tensor(two, dtype=torch.float64) - 1
    return difference.abs().max().item()


def _distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    return math.sqrt(sum((one[name] - tensor).double().square().sum().item() for name, tensor in two.items()))

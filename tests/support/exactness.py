"""When two trainings count as the same."""

import math

import torch

from pipetransformer.runtime.precision import PRECISIONS
from support.cases import Case, tensors_equal
from support.trainings import Trace

SAME_ROUNDING, OTHER_ROUNDING = 1 / 8, 1.0  # steps from one number to the next, see tests/runtime/test_precision.py


def assert_equal(elastic: Trace, reference: Trace) -> None:
    """Losses, gradient norms, weights and optimizer state within 1e-10; copies of a shared weight bit for bit."""
    assert elastic.ties_hold
    torch.testing.assert_close(elastic.losses, reference.losses, rtol=0, atol=1e-10)
    torch.testing.assert_close(elastic.norms, reference.norms, rtol=0, atol=1e-10)
    tensors_equal({name: elastic.weights[name] for name in reference.weights}, reference.weights)
    tensors_equal(elastic.moments, reference.moments)


def assert_near(elastic: Trace, reference: Trace, case: Case, num_steps: float) -> None:
    """Losses, gradient norms, and how far all weights went, within steps from one number to the next of the products.

    Args:
        case: In mixed precision.
        num_steps: A step is 2^-7 of a number in bfloat16, 2^-10 in float16.
    """
    products = PRECISIONS[case.precision].compute_dtype
    assert products is not None
    share = num_steps * torch.finfo(products).eps
    torch.testing.assert_close(elastic.losses, reference.losses, rtol=share, atol=0)
    torch.testing.assert_close(elastic.norms, reference.norms, rtol=share, atol=0)
    begun = {name: tensor.detach() for layer in case.stack().layers for name, tensor in layer.tensors()}
    apart, went = _distance(elastic.weights, reference.weights), _distance(begun, reference.weights)
    assert apart <= share * went, f"the weights went {went} and differ by {apart}"


def _distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum((one[name] - tensor).double().square().sum().item() for name, tensor in two.items()))

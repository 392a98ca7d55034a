"""When two trainings count as the same."""

import torch

from support.cases import tensors_equal
from support.trainings import Trace


def assert_equal(elastic: Trace, reference: Trace) -> None:
    """Losses, gradient norms, weights and optimizer state within 1e-10; copies of a shared weight bit for bit."""
    assert elastic.ties_hold
    torch.testing.assert_close(elastic.losses, reference.losses, rtol=0, atol=1e-10)
    torch.testing.assert_close(elastic.norms, reference.norms, rtol=0, atol=1e-10)
    tensors_equal({name: elastic.weights[name] for name in reference.weights}, reference.weights)
    tensors_equal(elastic.moments, reference.moments)

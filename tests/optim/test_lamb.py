"""LAMB over parts takes the steps of timm's own, to rounding, and goes on where that ended and back."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipetransformer.optim.base import Lamb

SPEC = Lamb(lr=0.1, weight_decay=0.1, eps=1e-6)


def trained(kinds: tuple[bool, ...], sum_over_parts: Callable[..., Tensor] = lambda _, values: values) -> list[Tensor]:
    """Two steps under each optimizer, of which the next one goes on with the state; ``True`` is that of parts."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4, 6), (6,), (3, 3))]
    with torch.no_grad():
        parameters[2].zero_()  # whose norm gives no ratio
    state: dict[Tensor, dict[str, Tensor]] = {}
    for of_parts in kinds:
        optimizer = SPEC.build_layers({0: parameters}, sum_over_parts=sum_over_parts if of_parts else None)
        assert optimizer is not None
        optimizer.state.update(state)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        state = {parameter: dict(optimizer.state[parameter]) for parameter in parameters}
    return [each.detach() for each in parameters]


def test_steps_are_those_of_timm() -> None:
    expected = trained((False,) * 3)
    for kinds in ((True,) * 3, (False, True, False), (True, False, True)):
        torch.testing.assert_close(trained(kinds), expected, rtol=0, atol=1e-12)


def test_norms_of_one_part_alone_would_be_another_training() -> None:
    """A mutation: where no rank sums, a part has a rate of its own."""
    halved = trained((True,), lambda _, values: values * torch.tensor([[0.5], [1.0]], dtype=torch.float64))
    assert (halved[0] - trained((True,))[0]).abs().max() > 1e-3

"""Fused kernels train as the plain ones do, and either goes on with the other's state."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.cases import Case
from support.exactness import assert_equal
from support.fusing import plain_kernels, train_plain
from support.plans import HEAD, plan
from support.pool import Pool
from support.trainings import Trace, train_elastic, train_reference
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from pipetransformer.optim.base import SGD, AdamW, OptimizerSpec
from pipetransformer.optim.fused import droppable, may_fuse, place_state

SPECS = [AdamW(lr=0.1, weight_decay=0.1), SGD(lr=0.1, weight_decay=0.1), SGD(lr=0.1, momentum=0.0)]
CPU = torch.device("cpu")
NAMES = ["adamw", "sgd", "sgd without momentum"]


def parameters() -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in ((9, 5), (7,))]


def built(spec: OptimizerSpec, own: Sequence[Parameter], fuses: bool) -> Optimizer:
    with nullcontext() if fuses else plain_kernels():
        optimizer = spec.build(own)
    assert optimizer is not None
    assert all(bool(group["fused"]) == fuses for group in optimizer.param_groups)
    return optimizer


def train(optimizer: Optimizer, own: Sequence[Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in own:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        optimizer.step()


def assert_same(one: Sequence[Tensor], two: Sequence[Tensor]) -> None:
    torch.testing.assert_close([*one], [*two], rtol=0, atol=1e-12)


@pytest.fixture(params=SPECS, ids=NAMES)
def spec(request: pytest.FixtureRequest) -> OptimizerSpec:
    return request.param


def test_a_cpu_has_them_too_and_plain_kernels_drop_no_step() -> None:
    assert may_fuse([{"params": parameters()}])
    assert not may_fuse([{"params": [*parameters(), Parameter(torch.zeros(3, device="meta"))]}])
    assert droppable(built(SPECS[0], parameters(), fuses=False)) is None


def test_fused_kernels_train_as_plain_ones(spec: OptimizerSpec) -> None:
    fused, plain = parameters(), parameters()
    train(built(spec, fused, fuses=True), fused, range(6))
    train(built(spec, plain, fuses=False), plain, range(6))
    assert_same(fused, plain)


@pytest.mark.parametrize("fuses", [False, True])
def test_either_goes_on_with_the_state_of_the_other(spec: OptimizerSpec, fuses: bool) -> None:
    whole, moved = parameters(), parameters()
    train(built(spec, whole, fuses=False), whole, range(6))
    first, second = built(spec, moved, fuses), built(spec, moved, not fuses)
    train(first, moved, range(3))
    for parameter, state in first.state.items():
        second.state[parameter] = place_state(second, state, CPU)
    train(second, moved, range(3, 6))
    assert_same(whole, moved)


def test_a_flag_drops_a_step_and_leaves_nothing_of_it(spec: OptimizerSpec) -> None:
    dropping, plain = parameters(), parameters()
    optimizer = built(spec, dropping, fuses=True)
    core = droppable(optimizer)
    assert core is not None
    for step in range(4):
        core.found_inf = torch.tensor(float(step in (0, 2)))  # type: ignore[attr-defined]
        train(optimizer, dropping, range(step, step + 1))
    expected = built(spec, plain, fuses=False)
    for step in (1, 3):
        train(expected, plain, range(step, step + 1))
    assert_same(dropping, plain)
    for one, two in zip(dropping, plain, strict=True):
        assert optimizer.state[one].keys() >= expected.state[two].keys()
        assert all(torch.allclose(optimizer.state[one][key], value) for key, value in expected.state[two].items())


def test_an_optimizer_whose_first_step_cannot_be_dropped_is_not_taken_for_one() -> None:
    assert droppable(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, fused=True)) is None
    assert droppable(torch.optim.Adam(parameters(), lr=0.1, fused=True)) is None
    assert droppable(None) is None


def late(begin: Callable[[Sequence[Parameter]], Optimizer]) -> list[Parameter]:
    """A parameter has its first gradient when the other has had two."""
    own = parameters()
    optimizer = begin(own)
    for step in range(4):
        train(optimizer, own[: 1 + (step > 1)], range(step, step + 1))
    return own


def test_a_parameter_that_begins_later_has_momentum_of_its_own() -> None:
    assert_same(*(late(lambda own, fuses=fuses: built(SPECS[1], own, fuses)) for fuses in (True, False)))
    with pytest.raises((TypeError, RuntimeError)):  # torch's own
        late(lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, fused=True))


@pytest.mark.thinned("fused-adamw_ema", "fused-sgd", "plain-adamw_ema")
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_ema", "sgd"])
@pytest.mark.parametrize("train", [train_elastic, train_plain], ids=["fused", "plain"])
def test_either_kernels_train_as_the_original_model_through_transitions(
    train: Callable[..., Trace], optimizer: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case("vit", bert_config, optimizer=optimizer, parks=True)
    plans = {0: plan(0, 0, [3, HEAD], 1, 2), 2: plan(2, 2, [HEAD], 2, 1), 4: plan(1, 0, [4, HEAD], 1, 2)}
    trace = pool.run(2, train, case, plans, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {0: 0, 2: 2, 4: 1}))

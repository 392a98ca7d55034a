"""What ranks tell each other travels with the gradients of replicas, and changes nothing about either."""

import math
from pathlib import Path

import pytest
import torch
from support.carriers import MUTATIONS, count_sums_of_a_step, told, train_mutated
from support.cases import Case
from support.exactness import assert_equal
from support.plans import HEAD, PIPE_TO_DATA
from support.pool import Pool
from support.trainings import train_reference

NUMBERS = [[1 / 3, 1e-9, 0.0], [-math.pi * 1e5, 2 / 3, 1.0], [1 / 7, 1e9 / 3, 1.0], [0.0, -5e-324, 0.0]]


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_sums_of_float64_come_with_gradients_of_float32_and_leave_them_alone(
    world: int, num_microbatches: int, pool: Pool
) -> None:
    numbers = torch.tensor(NUMBERS[:world], dtype=torch.float64)
    mean = num_microbatches * torch.arange(world).float().mean()
    first, *others = pool.run(world, told, NUMBERS[:world], num_microbatches)
    for step, (sums, gradient) in enumerate(first, start=1):
        error = (torch.tensor(sums, dtype=torch.float64) - step * numbers.sum(0)).abs()
        assert (error <= 2.0**-47 * step * numbers.abs().sum(0)).all(), "of 53 bits 48 arrive"
        torch.testing.assert_close(gradient, mean.view(1, 1))
    for other in others:
        assert [sums for sums, _ in other] == [sums for sums, _ in first], "bit for bit on every rank"


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_number_that_is_not_finite_stays_so_and_leaves_the_others_alone(number: float, pool: Pool) -> None:
    for steps in pool.run(2, told, [[number, 0.5], [2.0, 0.25]], 1):
        for step, (sums, gradient) in enumerate(steps, start=1):
            assert not math.isfinite(sums[0])
            assert sums[1] == 0.75 * step
            assert gradient.item() == 0.5


@pytest.mark.parametrize(("world", "num_sums"), [(1, 0), (2, 0), (3, 1)], ids=["alone", "carried", "three ranks"])
def test_a_step_on_replicas_makes_no_sum_of_its_own(
    world: int, num_sums: int, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case("vit", bert_config, precision="float32")
    loss = train_reference(Case("vit", bert_config), {}).losses[0]
    for counted, own_loss in pool.run(world, count_sums_of_a_step, case, str(tmp_path)):
        assert counted == num_sums
        assert own_loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(("world", "num_sums"), [(2, [1, 1]), (3, [2, 2, 1])], ids=["all ranks", "an idle one"])
def test_a_pipeline_of_all_ranks_sums_once(
    world: int, num_sums: list[int], pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """The norms of the gradient and what ranks tell each other; an idle rank hears the latter alone."""
    case = Case("vit", bert_config, precision="float32")
    loss = train_reference(Case("vit", bert_config), {}).losses[0]
    counted = pool.run(world, count_sums_of_a_step, case, str(tmp_path), (3, HEAD))
    assert [number for number, _ in counted] == num_sums
    assert [own_loss for _, own_loss in counted] == pytest.approx([loss] * world, rel=1e-5)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_broken_sums_do_not_pass_for_exact(mutation: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config)
    mutated = pool.run(4, train_mutated, mutation, case, PIPE_TO_DATA, str(tmp_path))[0]
    reference = train_reference(case, {step: plan.num_frozen for step, plan in PIPE_TO_DATA.items()})
    with pytest.raises(AssertionError):
        assert_equal(mutated, reference)

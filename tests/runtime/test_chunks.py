"""Layers that come from the host in chunks train bit for bit as those on the device, within their budget."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.cases import NUM_BLOCKS, Case, tensors_equal
from support.chunking import (
    CHUNK_MUTATIONS,
    chunked,
    losses_of_broken_chunks,
    most_bytes_of_homes,
    sizes_of,
    train_chunked,
    train_lending,
)
from support.exactness import assert_as_near_as_one_process, assert_equal
from support.mesh_plans import plan_on
from support.pool import Pool
from support.trainings import train_elastic, train_reference

from pipetransformer.autopipe.offload import Chunk, smallest_budget, step_traffic
from pipetransformer.mesh import SINGLE

LAYERS = range(NUM_BLOCKS + 2)


def budgets(case: Case) -> list[int]:
    """From the least to all of it."""
    sizes = sizes_of(case)
    least, whole = smallest_budget(sizes), sum(sizes.values())
    return [least, 2 * least, (least + whole) // 2, whole]


@pytest.mark.thinned("vit")
@pytest.mark.parametrize(("kind", "num_microbatches"), [("vit", 1), ("bert", 2)])
def test_any_budget_trains_bit_for_bit_as_all_on_the_device(
    kind: str, num_microbatches: int, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """And moves the bytes that the planner counts, in the first step and in later ones, evaluations between them."""
    case = Case(kind, bert_config, 0.2, precision="float32", num_steps=20)
    plan = plan_on(SINGLE, microbatches=num_microbatches)
    (plain,) = pool.run(1, train_elastic, case, {0: plan}, str(tmp_path))
    for number, budget in enumerate(budgets(case)):
        (own,) = pool.run(1, train_chunked, case, {0: chunked(plan, budget)}, str(tmp_path), number % 2 == 1)
        assert (own.trace.losses, own.trace.norms) == (plain.losses, plain.norms)
        tensors_equal(own.trace.weights, plain.weights, tolerance=0)
        first, later = step_traffic(sizes_of(case), budget, LAYERS, 0, num_microbatches)
        assert own.traffic[0] == first
        moved = {(each.fetched, each.written, each.ahead) for each in own.traffic[2:]}
        assert moved == {(later.fetched, later.written, later.ahead)}
        assert later.ahead > 0, "the forward pass has room for the next layer at any budget"
        assert max(each.peak for each in own.traffic) <= budget
        assert set(own.held) == {0}, "active weights change on the host, and gradients are needed there"


@pytest.mark.parametrize("mutation", CHUNK_MUTATIONS)
def test_broken_chunks_are_noticed(mutation: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config, 0.2, num_steps=4)
    least, *_, whole = budgets(case)
    budget = least if mutation.startswith("a gradient") else whole
    plans = {0: chunked(plan_on(SINGLE, microbatches=2), budget)}
    (losses,) = pool.run(1, losses_of_broken_chunks, case, plans, mutation, str(tmp_path))
    reference = train_reference(case, {}).losses
    assert max(abs(one - other) for one, other in zip(losses, reference, strict=True)) > 1e-7


def test_frozen_layers_have_no_gradient_and_no_moments_and_cached_ones_are_not_fetched(
    pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """12 bytes less for each number that freezes, on the host and in a file alike."""
    case = Case("vit", bert_config, 0.2, precision="float32", num_steps=6)
    sizes, budget = sizes_of(case), 2 * smallest_budget(sizes_of(case))
    plans = [plan_on(SINGLE), plan_on(SINGLE, frozen=3), plan_on(SINGLE, frozen=3, level=3)]
    steps = {2 * number: chunked(plan, budget) for number, plan in enumerate(plans)}
    (own,) = pool.run(1, train_chunked, case, steps, str(tmp_path), False, True)
    (plain,) = pool.run(1, train_elastic, case, dict(zip(steps, plans, strict=True)), str(tmp_path / "plain"))
    assert own.trace.losses == plain.losses
    tensors_equal(own.trace.weights, plain.weights, tolerance=0)
    whole, frozen = (sum(sizes[Chunk(layer, "weights")] for layer in range(last)) for last in (8, 4))
    assert own.home_bytes == [4 * whole] * 2 + [4 * whole - 3 * frozen] * 2 + [4 * (whole - frozen)] * 2
    assert own.traffic[-1] == step_traffic(sizes_of(case, 4, 4), budget, range(4, 8), 4, 1)[1]


def test_a_transition_takes_the_room_of_one_layer_besides_the_chunks(
    pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """A disk that holds the chunks of a run holds those of its next plan, too."""
    case = Case("vit", bert_config)
    sizes, budget = sizes_of(case), smallest_budget(sizes_of(case))
    plans = {number: chunked(plan_on(SINGLE, frozen=frozen), budget) for number, frozen in enumerate((0, 3))}
    (most,) = pool.run(1, most_bytes_of_homes, case, plans, str(tmp_path))
    kept = [sum(sizes_of(case, first_active=active).values()) for active in (0, 4)]
    assert most[0] == kept[0]
    assert most[1] <= kept[1] + max(sizes.values())


def test_frozen_layers_come_one_at_a_time_for_what_the_cache_lacks(
    pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """In the fill, too: a device that takes a budget of chunks has no room for all of them."""
    case = Case("vit", bert_config, 0.2, num_steps=4, cache_shares=(1 / 2, 0.0))
    budget = smallest_budget(sizes_of(case))
    plans = {0: chunked(plan_on(SINGLE), budget), 2: chunked(plan_on(SINGLE, frozen=3, level=3), budget)}
    ((own, most),) = pool.run(1, train_lending, case, plans, str(tmp_path))
    assert most == 1
    assert own.trace.losses == pytest.approx(train_reference(case, {2: 3}).losses, rel=0, abs=1e-10)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_stages_and_replicas_go_with_chunks(num_stages: int, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("bert", bert_config, 0.2, num_steps=4)
    budget = smallest_budget(sizes_of(case))
    before = chunked(plan_on(SINGLE, num_stages, 3 - num_stages, microbatches=2), budget)
    plans = {0: before, 1: replace(before, num_frozen=1), 2: plan_on(SINGLE, 1, 2, frozen=2, level=2)}
    (own, _) = pool.run(2, train_chunked, case, plans, str(tmp_path))
    (mixed, _) = pool.run(2, train_elastic, case, plans, str(tmp_path))
    reference = train_reference(case, {1: 1, 2: 2})
    assert own.trace.losses == pytest.approx(reference.losses, rel=0, abs=1e-10)
    assert_equal(mixed, reference)


@pytest.mark.thinned("[float16")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_casts_of_weights_leave_with_them(precision: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config, 0.2, "sgd", precision=precision)
    plans = {0: chunked(plan_on(SINGLE, microbatches=2), smallest_budget(sizes_of(case)))}
    trace = pool.run(1, train_elastic, case, plans, str(tmp_path))[0]
    assert_as_near_as_one_process(trace, case, {0: 0}, 2)


def test_a_budget_below_the_largest_layer_would_be_exceeded(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config)
    least = smallest_budget(sizes_of(case))
    with pytest.raises(AssertionError, match=f"more exceed the budget of {least - 1}"):
        pool.run(1, train_chunked, case, {0: chunked(plan_on(SINGLE), least - 1)}, str(tmp_path))

"""Plans with chunks: only where the model is more than their budget, within the memory beside them, at their price."""

from dataclasses import replace

import pytest

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.autopipe.search.chunked import chunked_plan
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.errors import InfeasiblePlan

SECOND = AffineTime(0.0, 1.0)
LAYER = LayerProfile("block", SECOND, SECOND, SECOND, 0.0, parameter_bytes=1000, activation_bytes=70, output_bytes=3)
PROFILE = Profile((LAYER,) * 6, optimizer_state_factor=2, host_copy_s_per_byte=1e-3)
ALONE = Cluster(1, None, Link(0.0, 1e9))
WHOLE = 6 * 4000


def test_a_model_that_fits_the_budget_lies_on_the_device() -> None:
    assert chunked_plan(PROFILE, ALONE, 4, WHOLE) == best_plan(PROFILE, ALONE, 4)
    chunked = chunked_plan(PROFILE, ALONE, 4, WHOLE - 1)
    assert chunked.chunk_bytes == WHOLE - 1
    assert chunked.recompute


def test_what_freezes_and_what_is_cached_leaves_the_budget() -> None:
    frozen = 3 * 1000 + 3 * 4000
    assert chunked_plan(PROFILE, ALONE, 4, frozen - 1, num_frozen=2).chunk_bytes
    assert not chunked_plan(PROFILE, ALONE, 4, frozen, num_frozen=2).chunk_bytes
    assert not chunked_plan(PROFILE, ALONE, 4, 3 * 4000, num_frozen=2, cache_level=2).chunk_bytes


def test_chunks_stay_where_cached_layers_that_some_samples_run_through_do_not_fit_too() -> None:
    partial = replace(PROFILE, cache_miss_rate=0.5)
    assert chunked_plan(partial, ALONE, 4, 3 * 4000 + 3 * 1000 - 1, num_frozen=2, cache_level=2).chunk_bytes
    assert not chunked_plan(partial, ALONE, 4, 3 * 4000 + 3 * 1000, num_frozen=2, cache_level=2).chunk_bytes


def test_each_pass_waits_for_its_chunks() -> None:
    plan = chunked_plan(PROFILE, ALONE, 4, 2000)
    without = replace(plan, chunk_bytes=0)
    fetched_s = 6 * (2 * 1.0 + 1.0)  # weights for both forward passes, and the gradient back
    assert plan.num_microbatches == 1
    assert plan.predicted_step_s == pytest.approx(step_seconds(PROFILE, ALONE, without, 4) + fetched_s)


def test_a_device_holds_the_budget_and_its_activations() -> None:
    limit = 2000 + 4 * (5 * 3 + 70 - 3)  # the input of each layer, and a layer at a time, whose input is one of them
    cluster = replace(ALONE, device_memory_bytes=limit)
    one = PlanConstraints(num_microbatches=1)
    plan = chunked_plan(PROFILE, cluster, 4, 2000, constraints=one)
    assert device_memory_bytes(PROFILE, plan, 4) == (limit,)
    with pytest.raises(InfeasiblePlan, match="no plan fits"):
        chunked_plan(PROFILE, replace(ALONE, device_memory_bytes=limit - 1), 4, 2000, constraints=one)


def test_impossible_budgets_are_refused_with_numbers() -> None:
    with pytest.raises(InfeasiblePlan, match=r"\(1,999 bytes\) is less than weights and gradient .* 2,000 bytes"):
        chunked_plan(PROFILE, ALONE, 4, 1999)
    with pytest.raises(InfeasiblePlan, match="leaves nothing of"):
        chunked_plan(PROFILE, replace(ALONE, device_memory_bytes=2000), 4, 2000)

"""The limits of the alpha rule as the paper's table states them.

The reading that gives the table: a decision takes effect for the epoch after it, so the first epoch trains everything;
the first active layer computes no input gradient, which with nothing frozen is the embedding, not block 0. Two entries
differ by one in their last digit (2.83 for 2.84, 4.86 for 4.87).
"""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.limit import (
    Fill,
    Phase,
    efficiency,
    fill_seconds,
    limit,
    pipeline_efficiency,
    spread_overhead,
    work_seconds,
)
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.autopipe.search.search import best_plan

FREE_CLUSTER = Cluster(4, None, Link(0.0, 1e30))
NOTHING, UNIT = AffineTime(9, 0), AffineTime(9, 1)  # the launch overhead must not count


def uniform(num_blocks: int) -> Profile:
    block = LayerProfile("block", UNIT, UNIT, UNIT, 9, 9, 9, 9)
    free = LayerProfile("free", NOTHING, NOTHING, NOTHING, 9, 9, 9, 9)
    return Profile((free, *(block,) * num_blocks, free), optimizer_state_factor=2)


def prefixes(alpha: Fraction, num_blocks: int, num_epochs: int) -> list[int]:
    return [ceil(num_blocks * (1 - (1 - alpha) ** epoch)) for epoch in range(num_epochs)]


@pytest.mark.parametrize(
    ("num_blocks", "num_epochs", "alpha", "prefix", "filled", "without_overhead"),
    [
        (12, 10, "1/5", 1.72, 2.42, 2.61),
        (12, 10, "1/4", 1.86, 2.84, 3.13),
        (12, 10, "1/3", 2.02, 3.53, 4.00),
        (12, 10, "2/5", 2.14, 4.19, 4.87),
        (12, 10, "1/2", 2.24, 4.80, 5.71),
        (24, 3, "1/3", 1.27, 1.33, 1.46),
    ],
)
def test_the_limits_of_the_alpha_rule(
    num_blocks: int, num_epochs: int, alpha: str, prefix: float, filled: float, without_overhead: float
) -> None:
    profile, frozen = uniform(num_blocks), prefixes(Fraction(alpha), num_blocks, num_epochs)
    cached = [Phase(n, n, 1) for n in frozen]
    fills = [Fill(low, high, 1) for low, high in pairwise(frozen)]
    assert limit(profile, [Phase(n, 0, 1) for n in frozen]) == pytest.approx(prefix, abs=0.006)
    assert limit(profile, cached, fills) == pytest.approx(filled, abs=0.006)
    assert limit(profile, cached) == pytest.approx(without_overhead, abs=0.006)


def test_work_leaves_out_what_is_frozen_and_what_is_cached() -> None:
    profile = uniform(4)
    assert [work_seconds(profile, *state, 10) for state in ((0, 0), (2, 0), (2, 2), (4, 4))] == [120, 70, 50, 0]


def test_a_fill_runs_the_forward_between_two_levels() -> None:
    profile = Profile(
        (LayerProfile("embedding", AffineTime(9, 5), NOTHING, NOTHING, 0, 0, 0, 0), *uniform(4).layers[1:]), 2
    )
    assert fill_seconds(profile, 0, 2, num_samples=10) == 70
    assert fill_seconds(profile, 2, 4, num_samples=10) == 20


def test_phases_count_by_their_samples() -> None:
    assert limit(uniform(4), [Phase(0, 0, 30), Phase(2, 2, 10)]) == pytest.approx(480 / 410)


def test_without_freezing_only_the_bubbles_are_left_to_gain() -> None:
    efficiency = pipeline_efficiency(num_stages=8, num_microbatches=2)
    assert efficiency == pytest.approx(2 / 9)
    assert limit(uniform(4), [Phase(0, 0, 5)], static_efficiency=efficiency) == pytest.approx(4.5)


def test_a_balanced_plan_without_overhead_has_the_efficiency_of_the_formula() -> None:
    work, free = AffineTime(0, 1), AffineTime(0, 0)
    block = LayerProfile("block", work, work, work, 0, 1, 1, 0)
    embedding = LayerProfile("embedding", work, free, AffineTime(0, 2), 0, 1, 1, 0)
    profile = Profile((embedding, block, block, block), optimizer_state_factor=2)
    plan = Plan(0, 0, ((0, 0), (1, 1), (2, 2), (3, 3)), num_replicas=1, num_microbatches=8)
    step_s = step_seconds(profile, FREE_CLUSTER, plan, batch_size=16)
    assert efficiency(profile, 16, 4, step_s) == pytest.approx(pipeline_efficiency(4, 8))


@given(st.integers(1, 4), st.integers(1, 8), st.floats(0, 1), st.integers(0, 3), st.booleans())
def test_no_plan_is_faster_than_the_limit(
    num_stages: int, num_microbatches: int, latency_s: float, num_frozen: int, caches: bool
) -> None:
    """Whatever static plan a run is compared with, its own plans stay below what its decisions allow."""
    cluster = replace(FREE_CLUSTER, link=Link(latency_s, 10.0))
    profile, batch_size = uniform(3), 16
    constraints = PlanConstraints(num_stages=num_stages, num_microbatches=num_microbatches, num_replicas=1)
    static_s = best_plan(profile, cluster, batch_size, constraints=constraints).predicted_step_s
    plan = best_plan(profile, cluster, batch_size, num_frozen, num_frozen if caches else 0)
    without_overhead = spread_overhead(profile, -(-batch_size // cluster.num_devices))
    phases = [Phase(plan.num_frozen, plan.cache_level, batch_size)]
    bound = limit(
        without_overhead,
        phases,
        static_efficiency=efficiency(without_overhead, batch_size, cluster.num_devices, static_s),
    )
    assert static_s / plan.predicted_step_s <= bound * (1 + 1e-9)


def test_launch_overhead_is_spread_over_the_share() -> None:
    layer = spread_overhead(uniform(3), 3).layers[1]
    assert (layer.forward, layer.input_grad, layer.weight_grad) == (
        AffineTime(0, 4),
        AffineTime(0, 4),
        AffineTime(0, 4),
    )

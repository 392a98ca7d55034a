from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.report.trace import COMPUTE, Event
from pipetransformer.simulate.step import idle_share, step_events

SECOND = AffineTime(0.0, 1.0)
LAYER = LayerProfile("block", SECOND, SECOND, SECOND, 0.5, 1000, 0, 10)
PROFILE = Profile((LAYER,) * 8, 2.0)
CLUSTER = Cluster(16, None, Link(0.0, 1e12))
SLOW = Cluster(16, None, Link(0.1, 100.0))


def pipeline(num_stages: int, num_microbatches: int, schedule: str = "gpipe", stages_per_rank: int = 1) -> Plan:
    size = len(PROFILE.layers) // num_stages
    stages = tuple((first, first + size - 1) for first in range(0, len(PROFILE.layers), size))
    return Plan(0, 0, stages, 2, num_microbatches, schedule, stages_per_rank)


def end_s(events: list[Event]) -> float:
    return max(event.end_s for event in events)


PLANS = [
    pipeline(1, 1),
    pipeline(4, 2),
    pipeline(4, 8),
    pipeline(4, 8, "1f1b"),
    pipeline(8, 8, "interleaved1f1b", stages_per_rank=2),
    replace(pipeline(4, 8, "1f1b"), recompute=True),
    Plan(4, 0, ((0, 3), (4, 7)), 2, 4, "1f1b"),
    Plan(4, 4, ((5, 5), (6, 7)), 2, 4, "1f1b"),
    Plan(2, 0, ((0, 7),), 4, 2, fsdp=True),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_step_ends_when_the_cost_model_says(plan: Plan) -> None:
    expected = step_seconds(PROFILE, CLUSTER, plan, 16)
    assert end_s(step_events(PROFILE, CLUSTER, plan, 16)) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_no_device_computes_two_things_at_once(plan: Plan) -> None:
    for cluster in (CLUSTER, SLOW):
        events = [event for event in step_events(PROFILE, cluster, plan, 16) if event.category in COMPUTE]
        for device in range(plan.pipeline_size):
            own = [event for event in events if event.rank == device]
            assert all(before.end_s <= after.start_s + 1e-9 for before, after in pairwise(own))


@settings(deadline=None, max_examples=40)
@given(
    num_stages=st.sampled_from([1, 2, 4, 8]),
    num_microbatches=st.integers(1, 16),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_the_idle_share_of_even_stages_is_that_of_the_textbook(
    num_stages: int, num_microbatches: int, schedule: str
) -> None:
    plan = replace(pipeline(num_stages, num_microbatches, schedule), num_replicas=1)
    even = replace(PROFILE, layers=tuple(replace(layer, input_grad=AffineTime(0, 0)) for layer in PROFILE.layers))
    waiting = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert idle_share(step_events(even, CLUSTER, plan, 16)) == pytest.approx(waiting, abs=1e-6)


def test_a_frozen_stage_has_no_backward_pass_and_gets_no_gradient() -> None:
    events = step_events(PROFILE, CLUSTER, Plan(4, 0, ((0, 3), (4, 7)), 1, 2), 16)
    assert {event.rank for event in events if event.category == "backward"} == {1}
    assert [event.rank for event in events if event.category == "transfer"] == [0, 0]


def test_shards_are_exchanged_before_each_pass_and_not_at_the_end() -> None:
    plan = Plan(0, 0, ((0, 7),), 4, 2, fsdp=True)
    events = step_events(PROFILE, SLOW, plan, 16)
    names = ["shards of F0", "F0", "shards of B0", "B0", "shards of F1", "F1", "shards of B1", "B1", "optimizer"]
    assert [event.name for event in events] == names
    assert end_s(events) == pytest.approx(step_seconds(PROFILE, SLOW, plan, 16))


def test_one_replica_has_nothing_to_average_and_one_stage_nothing_to_send() -> None:
    events = step_events(PROFILE, CLUSTER, replace(pipeline(1, 2), num_replicas=1), 16)
    assert {event.category for event in events} == {"forward", "backward", "optimizer"}


def test_reading_the_cache_takes_time_before_the_first_stage_computes() -> None:
    plan = Plan(4, 4, ((5, 7),), 2, 1)
    first, slow = (
        step_events(replace(PROFILE, cache_read_s_per_byte=rate), CLUSTER, plan, 16)[0].seconds for rate in (0.0, 1.0)
    )
    assert slow == first + 8 * LAYER.output_bytes

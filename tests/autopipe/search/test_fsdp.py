"""What a sharded plan takes, and which one is the fastest."""

from dataclasses import replace

import pytest

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.memory import BATCHES_AHEAD, device_memory_bytes
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.autopipe.search.search import fsdp_plan
from pipetransformer.errors import InfeasiblePlan

# forward 1 s, input gradient 10 s, weight gradient 100 s per sample; no overhead
LAYER = LayerProfile("block", AffineTime(0, 1), AffineTime(0, 10), AffineTime(0, 100), 0.5, 1000, 7, 3)
PROFILE = Profile((LAYER,) * 4, optimizer_state_factor=2)
LARGE = Profile((replace(LAYER, activation_bytes=700, output_bytes=300),) * 4, optimizer_state_factor=2)
SLOW = Cluster(4, None, Link(latency_s=0.5, bandwidth_bytes_per_s=100))
HALF_S = (0.5 + 2 * 3 / 4 * 1000 / 100) / 2  # of an all-reduce of one layer over four devices


def sharded(num_frozen: int = 0, cache_level: int = 0, num_microbatches: int = 1, num_devices: int = 4) -> Plan:
    stage = (cache_level + 1 if cache_level else 0, 3)
    return Plan(num_frozen, cache_level, (stage,), num_devices, num_microbatches, fsdp=True)


@pytest.mark.parametrize(
    ("plan", "num_halves", "num_active"),
    [
        (sharded(), 4 + 2 * 4, 4),
        (sharded(num_frozen=1), 4 + 2 * 2, 2),
        (sharded(num_frozen=1, cache_level=1), 2 + 2 * 2, 2),
        (sharded(num_microbatches=3), 3 * (4 + 2 * 4), 4),
    ],
    ids=["all", "frozen", "cached", "micro-batches"],
)
def test_layers_are_gathered_to_run_and_gradients_dealt_out(plan: Plan, num_halves: int, num_active: int) -> None:
    """A quarter of the update on each device; the rest as without a link to pay for."""
    alone = replace(plan, num_replicas=1, fsdp=False)
    updates_s = (step_seconds(PROFILE, SLOW, one, one.num_replicas * 6) for one in (plan, alone))
    sharded_s, alone_s = updates_s
    assert sharded_s - alone_s == pytest.approx(num_halves * HALF_S + num_active * 0.5 * (1 / 4 - 1))


@pytest.mark.parametrize(
    ("plan", "num_halves"),
    [
        (sharded(), 8),
        (sharded(num_frozen=1), 4 + 2),
        (sharded(num_frozen=1, cache_level=1), 2 + 2),
        (sharded(num_microbatches=3), 3 * 8),
        (replace(sharded(), fsdp=False), 0),
    ],
    ids=["all", "frozen", "cached", "micro-batches", "replicas"],
)
def test_what_fsdp_does_itself_counts_for_each_layer_half_of_it_forward(plan: Plan, num_halves: int) -> None:
    for known in ({"sharding_overhead_s": 3.0}, {"sharding_s_per_byte": 3.0 / LAYER.parameter_bytes}):
        added_s = step_seconds(replace(PROFILE, **known), SLOW, plan, 12) - step_seconds(PROFILE, SLOW, plan, 12)
        assert added_s == pytest.approx(num_halves * 1.5)


def test_one_device_has_nothing_to_exchange() -> None:
    plan = sharded(num_devices=1)
    assert step_seconds(PROFILE, SLOW, plan, 2) == step_seconds(PROFILE, SLOW, replace(plan, fsdp=False), 2)


def test_a_layer_without_parameters_exchanges_nothing() -> None:
    empty = Profile((replace(LAYER, parameter_bytes=0),) * 4, optimizer_state_factor=2)
    assert step_seconds(empty, SLOW, sharded(), 4) == pytest.approx(434 + 4 * 0.5 / 4)


def test_memory_is_a_share_of_what_lasts_and_the_layers_at_their_turn() -> None:
    """At the second layer its neighbours are whole, too, what two of four layers saved is still there, and the shards
    of two gradients are made."""
    assert device_memory_bytes(PROFILE, sharded(), batch_size=8) == (4 * 3000 // 4 + 4 * 1000 + 2 * 7 * 2 + 2 * 250,)
    lasting = (2 * 1000 + 2 * 3000) // 4
    assert device_memory_bytes(PROFILE, sharded(1), batch_size=8) == (lasting + 4 * 1000 + 7 * 2 + 250,)
    # two layers run, the cache is read for all micro-batches, and the first one has made all gradients
    cached = sharded(1, 1, num_microbatches=2)
    features = 2 * 3 * (1 + BATCHES_AHEAD)
    assert device_memory_bytes(PROFILE, cached, 8) == (lasting + 3 * 1000 + 2 * 7 + 2 * 250 + features,)


def test_a_frozen_layer_takes_what_it_needs_to_run() -> None:
    profile = Profile((replace(LAYER, peak_forward_bytes=500),) * 4, optimizer_state_factor=2)
    assert device_memory_bytes(profile, sharded(1), batch_size=8) == (2000 + 4 * 1000 + 500 * 2,)


def test_an_active_layer_takes_what_its_backward_pass_allocates() -> None:
    profile = Profile((replace(LAYER, peak_backward_bytes=500),) * 4, optimizer_state_factor=2)
    assert device_memory_bytes(profile, sharded(), batch_size=8) == (3000 + 4000 + (2 * 7 + 500) * 2 + 2 * 250,)


def test_what_is_cast_for_backward_is_whole() -> None:
    profile = Profile((replace(LAYER, autocast_bytes=500),) * 4, optimizer_state_factor=2)
    less = device_memory_bytes(PROFILE, sharded(1), 8)[0]
    assert device_memory_bytes(profile, sharded(1), 8) == (less + 2 * 500,)


def test_checkpointing_saves_inputs_and_one_layer_at_a_time() -> None:
    plan = replace(sharded(), recompute=True)
    assert device_memory_bytes(PROFILE, plan, 8) == (3000 + 4000 + 2 * (3 + 7 - 3) + 500,), "its input is saved already"


def test_without_a_budget_there_is_one_micro_batch() -> None:
    plan = fsdp_plan(PROFILE, SLOW, batch_size=16)
    assert (plan.stages, plan.num_replicas, plan.num_microbatches, plan.recompute) == (((0, 3),), 4, 1, False)
    assert plan.fsdp
    assert plan.predicted_step_s == step_seconds(PROFILE, SLOW, plan, 16)


@pytest.mark.parametrize(
    ("num_bytes", "num_microbatches", "recompute"),
    [
        (3000 + 3000 + 4 * 700 * 16, 1, False),  # at the highest layer, before a gradient is made
        (3000 + 3000 + 4 * 700 * 8 + 1000, 2, False),
        (3000 + 4000 + 2 * 300 + 700 - 300 + 1000, 16, True),  # at the one below
    ],
)
def test_the_fastest_that_fits_is_chosen(num_bytes: int, num_microbatches: int, recompute: bool) -> None:
    free = replace(SLOW, allreduce_link=Link(0, float("inf")))
    plan = fsdp_plan(LARGE, replace(free, device_memory_bytes=num_bytes), batch_size=64)
    assert (plan.num_microbatches, plan.recompute) == (num_microbatches, recompute)
    assert device_memory_bytes(LARGE, plan, 64) == (num_bytes,)


def test_fewer_exchanges_are_worth_computing_again() -> None:
    num_bytes = 3000 + 3000 + (3 * 300 + 700 - 300) * 16
    plan = fsdp_plan(LARGE, replace(SLOW, device_memory_bytes=num_bytes), batch_size=64)
    assert (plan.num_microbatches, plan.recompute) == (1, True)


def test_what_is_fixed_holds() -> None:
    plan = fsdp_plan(PROFILE, SLOW, 16, 1, 1, PlanConstraints(num_microbatches=3, recompute=True))
    assert (plan.num_microbatches, plan.recompute, plan.first_layer) == (3, True, 2)


def test_too_little_memory_is_told_how_much_it_takes() -> None:
    tight = replace(SLOW, device_memory_bytes=8000)
    with pytest.raises(
        InfeasiblePlan, match=r"a sharded plan does not fit .* at least 8\.382e-06 GiB on each of 4 devices"
    ):
        fsdp_plan(LARGE, tight, batch_size=64)


def test_more_devices_than_samples_are_refused() -> None:
    with pytest.raises(InfeasiblePlan, match="batch_size=3 has samples for"):
        fsdp_plan(PROFILE, SLOW, batch_size=3)

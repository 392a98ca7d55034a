"""The parts of a step: work, and what keeps the devices from it.

A pipeline of two stages with two micro-batches; a device's time is drawn from left to right::

    device 0   F0 F1    B0    B1  update  fixed     F, B   layers, recomputing, launches, cache reads
    device 1      F0 B0 F1 B1     update  fixed     blank  waiting, and transfers where a message is under way

Computing is that of all devices over their number, so that a device that is idle waits. All else is what the step takes
longer for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.cost import (
    as_searched,
    compute_seconds,
    layer_time,
    layers_with_grad,
    missed_seconds,
    slowest_update,
    stage_seconds,
    step_scale,
    stored_time,
)
from pipetransformer.autopipe.plan import Plan, microbatch_size
from pipetransformer.autopipe.profile import Profile
from pipetransformer.autopipe.schedules import SCHEDULES


class StepParts(NamedTuple):
    """Seconds of a step by what they go to; together they are the step.

    Attributes:
        active: Passes of the layers that take a gradient, without the time of launching them.
        frozen: Forward passes of frozen layers that no cache has the output of.
        recompute: Forward passes that activation checkpointing makes again.
        launch: Launching every layer for each micro-batch, and rows that pad the last one.
        cache: Reading frozen layers' output from the cache, and computing what it does not hold.
        wait: Waiting for other stages: the schedule, stages that take different times, devices without a stage.
        transfer: Messages between stages, exchanges of a mesh, of FSDP and with host memory, and the schedule itself.
        all_reduce: Gradients over the replicas.
        optimizer: The update.
        fixed: What no plan changes: reading the batch, norms, clipping, bookkeeping.
    """

    active: float
    frozen: float
    recompute: float
    launch: float
    cache: float
    wait: float
    transfer: float
    all_reduce: float
    optimizer: float
    fixed: float


def step_parts(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> StepParts:
    """Returns the parts of a step as :func:`~pipetransformer.autopipe.cost.step_seconds` predicts it.

    Args:
        profile: Ignores what steps so far have shown: a correction has no part of its own.
        cluster: All devices, those that the plan leaves idle included.
        plan: What runs.
        batch_size: Samples of the global batch.
    """
    bare_layers = profile.sharded(plan.mesh).layers
    profile, cluster, plan, batch_size = as_searched(replace(profile, timed=()), cluster, plan, batch_size)
    bare = replace(profile, layers=bare_layers)
    scale = step_scale(profile, cluster, plan.devices, plan.cache_level, batch_size, plan.fsdp)
    busy = StepParts(*(scale.factor * each for each in _busy_parts(profile, bare, cluster, plan, batch_size)))
    num_rows = microbatch_size(batch_size, plan.num_replicas, num_microbatches=1)
    missed_s = scale.factor * missed_seconds(profile, plan.cache_level, num_rows)
    return busy._replace(cache=busy.cache + missed_s, fixed=scale.fixed_s - missed_s)


def _busy_parts(profile: Profile, bare: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> StepParts:
    """Returns the parts of a step while all devices are busy, without the fixed one.

    Args:
        bare: The profile without what layers exchange.
    """
    passes = plan.num_replicas * plan.num_microbatches / cluster.num_devices
    computing_s, with_exchanges_s = (passes * sum(compute_seconds(each, plan, batch_size)) for each in (bare, profile))
    makespan = SCHEDULES[plan.schedule].makespan
    without_s = makespan(compute_seconds(profile, plan, batch_size), plan)
    with_s = makespan(stage_seconds(profile, cluster, plan, batch_size), plan)
    work = [seconds * batch_size / cluster.num_devices for seconds in _work(bare, plan)]
    active_s, frozen_s, recompute_s, cache_s = work
    update_s, optimizer_s = slowest_update(profile, cluster, plan)
    return StepParts(
        active=active_s,
        frozen=frozen_s,
        recompute=recompute_s,
        launch=computing_s - sum(work),
        cache=cache_s,
        wait=without_s - with_exchanges_s,
        transfer=with_s - without_s + with_exchanges_s - computing_s,
        all_reduce=update_s - optimizer_s,
        optimizer=optimizer_s,
        fixed=0.0,
    )


def _work(profile: Profile, plan: Plan) -> tuple[float, float, float, float]:
    """Returns device seconds of a sample without launches: active layers, frozen ones, recomputing, cache reads."""
    active = frozen = recompute = 0.0
    running = [*enumerate(layers_with_grad(profile, plan.num_frozen))][plan.first_layer :]
    for index, (layer, is_active) in running:
        seconds = layer_time(profile, index, plan.num_frozen).per_sample_s
        if is_active:
            active += seconds
            recompute += layer.forward_again.per_sample_s * plan.recompute
        else:
            frozen += seconds
    return active, frozen, recompute, stored_time(profile, plan.cache_level).per_sample_s if plan.cache_level else 0.0

"""The cost model: seconds per optimizer step, from measured layers.

With a frozen prefix, a layer's work per micro-batch is (``F`` forward, ``D`` input gradient, ``W`` weight gradient,
``L`` the backward pass without an input gradient, between ``W`` and ``D + W``)::

    layer     0 .. n     n + 1     n + 2 .. head         n > 0; with nothing frozen layer 0 is the first active one
    work        F        F + L       F + D + W           a cached layer does not run at all
                         one F more for each active layer with activation checkpointing, without the loss, and what
                         that takes itself

With FSDP each layer is all-gathered before forward and before backward, and its gradient is reduce-scattered. An
all-reduce is a reduce-scatter and an all-gather, so each of the three counts as half of one. The model overlaps none of
these collectives with computing, nor the all-reduce of other plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipetransformer.autopipe.cluster import Cluster, Link, allreduce_links, boundary_links
from pipetransformer.autopipe.correction import LayoutKind
from pipetransformer.autopipe.meshes import without_mesh
from pipetransformer.autopipe.offload import on_host
from pipetransformer.autopipe.plan import DeviceLayout, Layout, Plan, Stages, layer_above, microbatch_size
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, PrefixSums, Profile
from pipetransformer.autopipe.schedules import SCHEDULES
from pipetransformer.mesh import SINGLE


def layers_with_grad(profile: Profile, num_frozen: int) -> list[tuple[LayerProfile, bool]]:
    """Returns each layer, and whether it takes a gradient."""
    first_active = layer_above(num_frozen)
    return [(layer, i >= first_active) for i, layer in enumerate(profile.layers)]


def layer_time(profile: Profile, layer: int, num_frozen: int, recompute: bool = False) -> AffineTime:
    """Returns the time of a layer that runs, per micro-batch."""
    measured = profile.layers[layer]
    first_active = layer_above(num_frozen)
    if layer < first_active:
        return measured.forward
    backward = measured.backward_as_lowest if layer == first_active else measured.input_grad + measured.weight_grad
    time = measured.forward + backward
    return time + measured.forward_again if recompute else time


def running_times(profile: Profile, num_frozen: int, cache_level: int, recompute: bool) -> list[AffineTime]:
    """Returns the time of each layer above the cache; the lowest one includes reading what is stored."""
    first = layer_above(cache_level)
    times = [layer_time(profile, layer, num_frozen, recompute) for layer in range(first, len(profile.layers))]
    if cache_level:
        times[0] += stored_time(profile, cache_level)
    return times


def stored_time(profile: Profile, cache_level: int) -> AffineTime:
    """Returns the time until the output of a cached block is on the device, of the samples that are stored."""
    stored = 1 - profile.cache_miss_rate
    return AffineTime(0.0, stored * profile.cache_read_s_per_byte * profile.layers[cache_level].output_bytes)


def missed_seconds(profile: Profile, cache_level: int, num_rows: int) -> float:
    """Returns the seconds that a replica takes in a step for the samples that the cache does not hold.

    Its lowest device reads their inputs and runs the frozen layers on them once for the whole batch, before the first
    micro-batch; no worker reads ahead of that.

    Args:
        num_rows: Samples of the replica's batch.
    """
    missing = profile.cache_miss_rate
    if not (cache_level and missing):
        return 0.0
    time = AffineTime(0.0, missing * profile.fill_read_s)
    for layer in (profile.whole or profile.layers)[: cache_level + 1]:
        time += AffineTime(layer.forward.fixed_s, missing * layer.forward.per_sample_s)
    return time.at(num_rows)


def boundary_seconds(profile: Profile, link: Link, layer: int, num_frozen: int, num_samples: float) -> float:
    """Returns the seconds of messages per micro-batch above ``layer``: its output, and the gradient that comes back."""
    if layer == len(profile.layers) - 1:
        return 0.0
    num_messages = 2 if layer >= layer_above(num_frozen) else 1
    return num_messages * link.seconds(profile.layers[layer].output_bytes * num_samples)


def compute_seconds(profile: Profile, plan: Plan, batch_size: int) -> list[float]:
    """Returns the seconds of each stage per micro-batch, without transfers."""
    num_samples = plan.microbatch_size(batch_size)
    times = running_times(profile, plan.num_frozen, plan.cache_level, plan.recompute)
    run_seconds = PrefixSums(time.at(num_samples) for time in times)
    return [run_seconds(first - plan.first_layer, last - plan.first_layer) for first, last in plan.stages]


def stage_seconds(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> list[float]:
    """Returns the seconds of each stage per micro-batch, with the boundary above it or FSDP's collectives."""
    exchange_s = sum(exchange_seconds(profile, cluster, plan))
    num_samples = plan.microbatch_size(batch_size)
    links = boundary_links(cluster, plan.devices)
    return [
        compute_s
        + boundary_seconds(profile, links[stage % len(links)], last, plan.num_frozen, num_samples)
        + schedule_overhead_seconds(profile, plan, stage)
        + exchange_s
        for stage, (compute_s, (_, last)) in enumerate(
            zip(compute_seconds(profile, plan, batch_size), plan.stages, strict=True)
        )
    ]


def schedule_overhead_seconds(profile: Profile, layout: Layout, stage: int) -> float:
    """Returns the seconds of the schedule itself per micro-batch: as often as a stage has a neighbour to talk to."""
    return profile.overhead_s(layout.schedule) * ((stage > 0) + (stage < layout.num_stages - 1))


def exchange_seconds(profile: Profile, cluster: Cluster, plan: Plan) -> tuple[float, float]:
    """Returns the seconds per micro-batch of FSDP and its collectives, forward and backward; zero for other plans.

    Half of what FSDP does itself is forward.
    """
    if not plan.fsdp or plan.num_replicas == 1:
        return 0.0, 0.0
    (allreduce_link,) = allreduce_links(cluster, plan.devices)
    moved = allreduce_volume(plan.num_replicas)
    running = layers_with_grad(profile, plan.num_frozen)[plan.first_layer :]

    def half(num_bytes: int) -> float:
        return allreduce_link.seconds(moved * num_bytes) / 2 if num_bytes else 0.0

    def own_seconds(layer: LayerProfile) -> float:
        return (profile.sharding_overhead_s + profile.sharding_s_per_byte * layer.parameter_bytes) / 2

    gathers = [(own_seconds(layer) + half(layer.parameter_bytes), layer, on) for layer, on in running]
    backward = (gather_s + half(layer.trainable_bytes) for gather_s, layer, on in gathers if on)
    return sum(gather_s for gather_s, _, _ in gathers), sum(backward)


def allreduce_volume(num_ranks: int) -> float:
    """Returns the bytes that a ring all-reduce moves over each link, as a multiple of the tensor's."""
    return 2 * (num_ranks - 1) / num_ranks


class UpdateCosts:
    """Seconds of a device after its pipeline: all-reduce over the replicas, optimizer.

    The all-reduce of tied weights is left out: a stage by itself does not tell where the copies are.

    FSDP has averaged the gradients in its reduce-scatter by then, and each device updates its shard.
    """

    def __init__(
        self, profile: Profile, num_frozen: int, num_replicas: int, links: Sequence[Link], fsdp: bool = False
    ) -> None:
        self._links = links
        self._volume = 0.0 if fsdp else allreduce_volume(num_replicas)
        num_shards = num_replicas if fsdp else 1
        layers = layers_with_grad(profile, num_frozen)
        self._bytes = PrefixSums(layer.summed_bytes * on for layer, on in layers)
        self._optimizer_s = PrefixSums(layer.optimizer_s * on / num_shards for layer, on in layers)

    def seconds(self, device: int, stages: Stages) -> float:
        """Returns the seconds of the device that runs these stages."""
        num_bytes, optimizer_s = sum(self._bytes(first, last) for first, last in stages), self.optimizer_seconds(stages)
        if self._volume == 0 or num_bytes == 0:
            return optimizer_s
        return self._links[device].seconds(self._volume * num_bytes) + optimizer_s

    def optimizer_seconds(self, stages: Stages) -> float:
        """Returns the optimizer's part of :meth:`seconds`."""
        return sum(self._optimizer_s(first, last) for first, last in stages)


class StepScale(NamedTuple):
    """Seconds of a step as a line in those of its pipeline and its update.

    ``factor`` has what the busy devices take from each other and what steps so far have shown of the predictions;
    ``fixed_s`` has reading, computing what the cache misses, waiting for the other devices and all else that depends on
    the grid of devices alone.
    """

    factor: float
    fixed_s: float

    def seconds(self, busy_s: float) -> float:
        """Returns the seconds of a step."""
        return self.factor * busy_s + self.fixed_s

    def busy_seconds(self, step_s: float) -> float:
        """Returns the seconds of pipeline and update that make a step of ``step_s``."""
        return (step_s - self.fixed_s) / self.factor


def kind_of_plan(plan: Plan) -> LayoutKind:
    """Returns the kind of a plan."""
    return kind_of(plan.devices, plan.fsdp) if plan.mesh == SINGLE else "mesh"


def kind_of(devices: DeviceLayout, fsdp: bool = False) -> LayoutKind:
    """Returns the kind of a layout without a mesh by its grid of devices."""
    if fsdp:
        return "sharded"
    if devices.pipeline_size == 1:
        return "single" if devices.num_replicas == 1 else "data"
    return "pipeline" if devices.num_replicas == 1 else "hybrid"


def step_scale(
    profile: Profile, cluster: Cluster, devices: DeviceLayout, cache_level: int, batch_size: int, fsdp: bool = False
) -> StepScale:
    """Returns the scale of all steps on a grid of devices, whatever its stages and micro-batches."""
    correction = profile.correction(profile.kind or kind_of(devices, fsdp), cache_level > 0)
    num_rows = microbatch_size(batch_size, devices.num_replicas, num_microbatches=1)
    read_s = profile.read.at(num_rows)
    if cache_level:  # the lowest layer's time has the bytes of what is stored
        read_s = profile.read_besides.at(num_rows) + profile.cache_read_fixed_s
    node_size = min(cluster.devices_per_node or cluster.num_devices, cluster.num_devices)
    ranks = cluster.ranks_per_device  # they are what shares cores and memory
    num_devices = devices.pipeline_size * devices.num_replicas
    relief = profile.relief(ranks * num_devices, ranks * node_size)
    waiting_s = profile.waiting_s * (num_devices > 1)
    missed_s = relief * missed_seconds(profile, cache_level, num_rows)
    fixed_s = correction.factor * (profile.step_overhead_s + waiting_s + read_s + missed_s) + correction.extra_s
    return StepScale(correction.factor * relief, fixed_s)


def step_seconds(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> float:
    """Returns the seconds of one optimizer step, as all that has been measured predicts them."""
    profile, cluster, plan, batch_size = as_searched(profile, cluster, plan, batch_size)
    scale = step_scale(profile, cluster, plan.devices, plan.cache_level, batch_size, plan.fsdp)
    return scale.seconds(busy_seconds(profile, cluster, plan, batch_size))


def as_searched(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> tuple[Profile, Cluster, Plan, int]:
    """Returns what the search has seen of a plan: no mesh, and layers that take what they exchange and fetch."""
    profile, cluster, plan, batch_size = without_mesh(profile, cluster, plan, batch_size)
    return on_host(profile) if plan.chunk_bytes else profile, cluster, plan, batch_size


def busy_seconds(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> float:
    """Returns the seconds of a step's pipeline and update while all devices are busy.

    After the pipeline each device all-reduces its gradients over the replicas and updates its layers. The slowest of
    them ends the step.
    """
    stages = stage_seconds(profile, cluster, plan, batch_size)
    return SCHEDULES[plan.schedule].makespan(stages, plan) + slowest_update(profile, cluster, plan)[0]


def slowest_update(profile: Profile, cluster: Cluster, plan: Plan) -> tuple[float, float]:
    """Returns the seconds of the device whose all-reduce and update take longest, and the optimizer's part of them."""
    links = allreduce_links(cluster, plan.devices)
    updates = UpdateCosts(profile, plan.num_frozen, plan.num_replicas, links, plan.fsdp)
    stages = (plan.stages[device :: plan.pipeline_size] for device in range(len(links)))
    return max((updates.seconds(device, own), updates.optimizer_seconds(own)) for device, own in enumerate(stages))

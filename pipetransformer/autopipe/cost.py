"""What a plan costs: seconds per optimizer step, from measured layers.

With a frozen prefix, a layer's work per micro-batch is (``F`` forward, ``D`` input gradient, ``W`` weight gradient)::

    layer     0 .. n     n + 1     n + 2 .. head         n > 0; with nothing frozen layer 0 is the first active one
    work        F        F + W       F + D + W           a cached layer does not run at all
                         one F more for each active layer with activation checkpointing

A sharded plan brings each layer together before it runs, forward and again backward, and deals its gradient out
afterwards. An all-reduce is a reduce-scatter and an all-gather, so each of the three is counted as half of one. Nothing
of it is taken to run beside the computing, as nothing of the all-reduce of other plans is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipetransformer.autopipe.cluster import Cluster, Link, allreduce_links, boundary_links
from pipetransformer.autopipe.plan import Plan, Stages, layer_above
from pipetransformer.autopipe.schedules import SCHEDULES


@dataclass(frozen=True)
class AffineTime:
    """Seconds as a line in the number of samples: launch overhead and work."""

    fixed_s: float
    per_sample_s: float

    def at(self, num_samples: float) -> float:
        """Seconds for one micro-batch of ``num_samples``."""
        return self.fixed_s + self.per_sample_s * num_samples

    def __add__(self, other: AffineTime) -> AffineTime:
        return AffineTime(self.fixed_s + other.fixed_s, self.per_sample_s + other.per_sample_s)


@dataclass(frozen=True)
class LayerProfile:
    """One measured layer.

    Attributes:
        name: For reports.
        forward: ``F``, per micro-batch.
        input_grad: ``D``, the gradient handed to the layer below.
        weight_grad: ``W``, the gradient of the layer's own parameters.
        optimizer_s: One optimizer update of the layer's parameters.
        parameter_bytes: All parameters; those that layers share count in each, because each has a copy.
        activation_bytes: Activations kept for backward, per sample.
        output_bytes: The output, per sample.
        peak_forward_bytes: The most that lives in a forward pass without gradient, output included, per sample.
        autocast_bytes: Copies of the parameters in a type of fewer bytes, while they take a gradient.
    """

    name: str
    forward: AffineTime
    input_grad: AffineTime
    weight_grad: AffineTime
    optimizer_s: float
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int
    peak_forward_bytes: int = 0
    autocast_bytes: int = 0


@dataclass(frozen=True)
class Profile:
    """A measured model.

    Attributes:
        layers: Embedding first and head last.
        optimizer_state_factor: The optimizer's bytes per parameter byte (2 for Adam).
        cache_read_s_per_byte: Until a cached output is on the device; 0 where it is read ahead of time.
        cache_miss_rate: Fraction of the samples that the cache cannot hold; they go through the frozen layers.
        schedule_overhead_s: Time of the schedule itself, per micro-batch and stage of a pipeline, besides layers and
            transfers.
    """

    layers: tuple[LayerProfile, ...]
    optimizer_state_factor: float
    cache_read_s_per_byte: float = 0.0
    cache_miss_rate: float = 0.0
    schedule_overhead_s: float = 0.0


class PrefixSums:
    """Sums over runs of layers, ``first`` and ``last`` included, in constant time."""

    def __init__(self, values: Iterable[float]) -> None:
        self._below = [0.0, *accumulate(values)]

    def __call__(self, first: int, last: int) -> float:
        return self._below[last + 1] - self._below[first]


def layers_with_grad(profile: Profile, num_frozen: int) -> list[tuple[LayerProfile, bool]]:
    """Each layer, and whether it takes a gradient."""
    first_active = layer_above(num_frozen)
    return [(layer, i >= first_active) for i, layer in enumerate(profile.layers)]


def layer_time(profile: Profile, layer: int, num_frozen: int, recompute: bool = False) -> AffineTime:
    """What a layer that runs takes, per micro-batch, at a frozen prefix."""
    measured = profile.layers[layer]
    first_active = layer_above(num_frozen)
    if layer < first_active:
        return measured.forward
    time = measured.forward + measured.weight_grad
    if layer > first_active:
        time += measured.input_grad
    return time + measured.forward if recompute else time


def running_times(profile: Profile, num_frozen: int, cache_level: int, recompute: bool) -> list[AffineTime]:
    """What each layer above the cache takes; the lowest one reads the cache, too, and computes what that misses."""
    first = layer_above(cache_level)
    times = [layer_time(profile, layer, num_frozen, recompute) for layer in range(first, len(profile.layers))]
    if cache_level:
        times[0] += cached_time(profile, cache_level)
    return times


def cached_time(profile: Profile, cache_level: int) -> AffineTime:
    """What it takes until the output of a block is there, read or computed."""
    missing = profile.cache_miss_rate
    time = AffineTime(0.0, (1 - missing) * profile.cache_read_s_per_byte * profile.layers[cache_level].output_bytes)
    if missing:
        for layer in profile.layers[: cache_level + 1]:
            time += AffineTime(layer.forward.fixed_s, missing * layer.forward.per_sample_s)
    return time


def boundary_seconds(profile: Profile, link: Link, layer: int, num_frozen: int, num_samples: float) -> float:
    """What a stage that ends at ``layer`` hands over per micro-batch: its output, and the gradient that comes back."""
    if layer == len(profile.layers) - 1:
        return 0.0
    num_messages = 2 if layer >= layer_above(num_frozen) else 1
    return num_messages * link.seconds(profile.layers[layer].output_bytes * num_samples)


def compute_seconds(profile: Profile, plan: Plan, batch_size: int) -> list[float]:
    """Seconds of each stage per micro-batch, without transfers."""
    num_samples = plan.microbatch_size(batch_size)
    times = running_times(profile, plan.num_frozen, plan.cache_level, plan.recompute)
    run_seconds = PrefixSums(time.at(num_samples) for time in times)
    return [run_seconds(first - plan.first_layer, last - plan.first_layer) for first, last in plan.stages]


def stage_seconds(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> list[float]:
    """Seconds of each stage per micro-batch, with the boundary above it or the exchange of its shards."""
    besides_s = sum(exchange_seconds(profile, cluster, plan)) + schedule_overhead_seconds(profile, plan.num_stages)
    num_samples = plan.microbatch_size(batch_size)
    links = boundary_links(cluster, plan.devices)
    return [
        compute_s + boundary_seconds(profile, links[stage % len(links)], last, plan.num_frozen, num_samples) + besides_s
        for stage, (compute_s, (_, last)) in enumerate(
            zip(compute_seconds(profile, plan, batch_size), plan.stages, strict=True)
        )
    ]


def schedule_overhead_seconds(profile: Profile, num_stages: int) -> float:
    """What the schedule takes for each micro-batch of a stage; a single stage does without one."""
    return profile.schedule_overhead_s if num_stages > 1 else 0.0


def exchange_seconds(profile: Profile, cluster: Cluster, plan: Plan) -> tuple[float, float]:
    """Seconds per micro-batch in which a sharded plan exchanges shards, forward and backward; zero for other plans."""
    if not plan.fsdp or plan.num_replicas == 1:
        return 0.0, 0.0
    (allreduce_link,) = allreduce_links(cluster, plan.devices)
    moved = allreduce_volume(plan.num_replicas)
    running = layers_with_grad(profile, plan.num_frozen)[plan.first_layer :]
    halves = [
        (allreduce_link.seconds(moved * layer.parameter_bytes) / 2, on)
        for layer, on in running
        if layer.parameter_bytes
    ]
    return sum(half for half, _ in halves), sum(2 * half for half, on in halves if on)


def allreduce_volume(num_ranks: int) -> float:
    """The share of its bytes that a ring all-reduce moves over each link."""
    return 2 * (num_ranks - 1) / num_ranks


class UpdateCosts:
    """What ends the step on a device: all-reduce over the replicas, optimizer.

    The sum over the copies of a weight that layers share is left out: where they lie is not known run by run.

    A sharded plan has averaged its gradients by then, and each device updates its share.
    """

    def __init__(
        self, profile: Profile, num_frozen: int, num_replicas: int, links: Sequence[Link], fsdp: bool = False
    ) -> None:
        self._links = links
        self._moved = 0.0 if fsdp else allreduce_volume(num_replicas)
        num_shards = num_replicas if fsdp else 1
        layers = layers_with_grad(profile, num_frozen)
        self._bytes = PrefixSums(layer.parameter_bytes * on for layer, on in layers)
        self._optimizer_s = PrefixSums(layer.optimizer_s * on / num_shards for layer, on in layers)

    def seconds(self, device: int, runs: Stages) -> float:
        """Seconds on the device that holds these runs of layers."""
        num_bytes, optimizer_s = sum(self._bytes(first, last) for first, last in runs), self.optimizer_seconds(runs)
        if self._moved == 0 or num_bytes == 0:
            return optimizer_s
        return self._links[device].seconds(self._moved * num_bytes) + optimizer_s

    def optimizer_seconds(self, runs: Stages) -> float:
        """The optimizer's part of it."""
        return sum(self._optimizer_s(first, last) for first, last in runs)


def step_seconds(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> float:
    """Seconds of one optimizer step.

    After the pipeline, each device averages its gradients over the replicas and updates its layers, and the slowest
    of them ends the step.
    """
    stages = stage_seconds(profile, cluster, plan, batch_size)
    links = allreduce_links(cluster, plan.devices)
    updates = UpdateCosts(profile, plan.num_frozen, plan.num_replicas, links, plan.fsdp)
    update_s = max(updates.seconds(device, plan.stages[device :: plan.pipeline_size]) for device in range(len(links)))
    return SCHEDULES[plan.schedule].makespan(stages, plan) + update_s

"""What a plan costs: seconds per optimizer step and bytes per device, from measured layers.

With a frozen prefix, a layer's work per micro-batch is (``F`` forward, ``D`` input gradient, ``W`` weight gradient)::

    layer     0 .. n     n + 1     n + 2 .. head         n > 0; with nothing frozen layer 0 is the first active one
    work        F        F + W       F + D + W           a cached layer does not run at all
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from pipetransformer.autopipe.plan import Plan


@dataclass(frozen=True)
class Time:
    """Seconds as a line in the number of samples: launch overhead and work."""

    fixed_s: float
    per_sample_s: float

    def at(self, num_samples: float) -> float:
        """Seconds for one micro-batch of ``num_samples``."""
        return self.fixed_s + self.per_sample_s * num_samples

    def __add__(self, other: Time) -> Time:
        return Time(self.fixed_s + other.fixed_s, self.per_sample_s + other.per_sample_s)


@dataclass(frozen=True)
class LayerProfile:
    """One measured layer.

    Attributes:
        name: For reports.
        forward: ``F``, per micro-batch.
        input_grad: ``D``, the gradient handed to the layer below.
        weight_grad: ``W``, the gradient of the layer's own parameters.
        optimizer_s: One optimizer update of the layer's parameters.
        parameter_bytes: All parameters.
        saved_bytes: Activations kept for backward, per sample.
        output_bytes: The output, per sample.
    """

    name: str
    forward: Time
    input_grad: Time
    weight_grad: Time
    optimizer_s: float
    parameter_bytes: int
    saved_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Profile:
    """All layers, embedding first and head last, and the optimizer's bytes per parameter byte (2 for Adam)."""

    layers: tuple[LayerProfile, ...]
    optimizer_state_factor: float


@dataclass(frozen=True)
class Cluster:
    """What there is to plan with: equal devices, their budget (``None``: no limit) and the links between them."""

    num_devices: int
    device_memory_bytes: int | None
    latency_s: float
    bandwidth_bytes_per_s: float

    def transfer_seconds(self, num_bytes: float) -> float:
        """Seconds for one message."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


class RunSums:
    """Sums over runs of layers, ``first`` and ``last`` included, in constant time."""

    def __init__(self, values: Iterable[float]) -> None:
        self._below = [0.0, *accumulate(values)]

    def __call__(self, first: int, last: int) -> float:
        return self._below[last + 1] - self._below[first]


def first_active_layer(num_frozen: int) -> int:
    """The first layer that takes a gradient: the embedding freezes with the first block."""
    return num_frozen + 1 if num_frozen else 0


def _with_active(profile: Profile, num_frozen: int) -> list[tuple[LayerProfile, bool]]:
    """Each layer, and whether it takes a gradient."""
    first_active = first_active_layer(num_frozen)
    return [(layer, i >= first_active) for i, layer in enumerate(profile.layers)]


def microbatch_size(batch_size: int, num_replicas: int, num_microbatches: int) -> int:
    """Samples per micro-batch; shares are padded up to it."""
    share = -(-batch_size // num_replicas)
    return -(-share // num_microbatches)


def layer_time(profile: Profile, layer: int, num_frozen: int) -> Time:
    """What a layer that runs takes, per micro-batch, at a frozen prefix."""
    measured = profile.layers[layer]
    first_active = first_active_layer(num_frozen)
    if layer < first_active:
        return measured.forward
    if layer == first_active:
        return measured.forward + measured.weight_grad
    return measured.forward + measured.input_grad + measured.weight_grad


def layer_seconds(profile: Profile, layer: int, num_frozen: int, num_samples: float) -> float:
    """:func:`layer_time` for one micro-batch of ``num_samples``."""
    return layer_time(profile, layer, num_frozen).at(num_samples)


def boundary_seconds(profile: Profile, cluster: Cluster, layer: int, num_frozen: int, num_samples: float) -> float:
    """What a stage that ends at ``layer`` hands over per micro-batch: its output, and the gradient that comes back."""
    if layer == len(profile.layers) - 1:
        return 0.0
    num_messages = 2 if layer >= first_active_layer(num_frozen) else 1
    return num_messages * cluster.transfer_seconds(profile.layers[layer].output_bytes * num_samples)


def compute_seconds(profile: Profile, plan: Plan, batch_size: int) -> tuple[float, ...]:
    """Seconds of each stage per micro-batch, without transfers."""
    num_samples = microbatch_size(batch_size, plan.num_replicas, plan.num_microbatches)
    return tuple(
        sum(layer_seconds(profile, layer, plan.num_frozen, num_samples) for layer in range(first, last + 1))
        for first, last in plan.stages
    )


def stage_seconds(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> tuple[float, ...]:
    """Seconds of each stage per micro-batch, with the boundary above it."""
    num_samples = microbatch_size(batch_size, plan.num_replicas, plan.num_microbatches)
    return tuple(
        compute_s + boundary_seconds(profile, cluster, last, plan.num_frozen, num_samples)
        for compute_s, (_, last) in zip(compute_seconds(profile, plan, batch_size), plan.stages, strict=True)
    )


class UpdateCosts:
    """What ends the step on the device that holds a run of layers: all-reduce over the replicas, optimizer."""

    def __init__(self, profile: Profile, cluster: Cluster, num_frozen: int, num_replicas: int) -> None:
        self._cluster = cluster
        self._num_replicas = num_replicas
        layers = _with_active(profile, num_frozen)
        self._bytes = RunSums(layer.parameter_bytes * on for layer, on in layers)
        self._optimizer_s = RunSums(layer.optimizer_s * on for layer, on in layers)

    def seconds(self, first: int, last: int) -> float:
        """A ring all-reduce moves ``2 (R - 1) / R`` times the bytes of the active parameters."""
        num_bytes = self._bytes(first, last)
        optimizer_s = self._optimizer_s(first, last)
        if self._num_replicas == 1 or num_bytes == 0:
            return optimizer_s
        moved_bytes = 2 * (self._num_replicas - 1) / self._num_replicas * num_bytes
        return self._cluster.transfer_seconds(moved_bytes) + optimizer_s


def step_seconds(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> float:
    """Seconds of one optimizer step.

    The first micro-batch passes every stage, the others follow at the pace of the slowest one (``M - 1`` times); then
    each stage averages its gradients over the replicas and updates its layers, and the slowest of them ends the step.
    1F1B and GPipe take the same time.
    """
    stages = stage_seconds(profile, cluster, plan, batch_size)
    updates = UpdateCosts(profile, cluster, plan.num_frozen, plan.num_replicas)
    pipeline_s = sum(stages) + (plan.num_microbatches - 1) * max(stages)
    return pipeline_s + max(updates.seconds(first, last) for first, last in plan.stages)


class MemoryCosts:
    """Bytes on the device that holds a run of layers.

    Weights of all its layers; gradients and optimizer state of the active ones; what the active ones save for
    backward, for each micro-batch in flight (frozen layers run without saving anything); for each micro-batch the
    tensor that comes from below and the tensor that goes up, for which the pipeline may keep buffers.
    """

    def __init__(self, profile: Profile, num_frozen: int) -> None:
        state_factor = 1 + profile.optimizer_state_factor
        self._head = len(profile.layers) - 1
        layers = _with_active(profile, num_frozen)
        self._parameters = RunSums(layer.parameter_bytes * (1 + state_factor * on) for layer, on in layers)
        self._saved = RunSums(layer.saved_bytes * on for layer, on in layers)
        # one size for all boundaries, so that a shorter run never needs more
        self._boundary = max(layer.output_bytes for layer in profile.layers[:-1])

    def bytes(self, first: int, last: int, num_samples: int, num_microbatches: int, num_in_flight: int) -> int:
        """Bytes with micro-batches of ``num_samples``, ``num_in_flight`` of them between forward and backward."""
        num_boundaries = (first > 0) + (last < self._head)
        saved = self._saved(first, last) * num_samples * num_in_flight
        boundaries = num_boundaries * self._boundary * num_samples * num_microbatches
        return round(self._parameters(first, last) + saved + boundaries)


def num_in_flight(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Micro-batches of a stage that wait for their backward at the worst moment."""
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)


def stage_memory_bytes(profile: Profile, plan: Plan, batch_size: int) -> tuple[int, ...]:
    """Bytes on the device of each stage; see :class:`MemoryCosts`."""
    costs = MemoryCosts(profile, plan.num_frozen)
    num_samples = microbatch_size(batch_size, plan.num_replicas, plan.num_microbatches)
    return tuple(
        costs.bytes(
            first,
            last,
            num_samples,
            plan.num_microbatches,
            num_in_flight(plan.schedule, stage, plan.num_stages, plan.num_microbatches),
        )
        for stage, (first, last) in enumerate(plan.stages)
    )

"""The measured model: seconds and bytes of each layer, from a measurement or counted on paper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from pipetransformer.autopipe.correction import Correction, LayoutKind, TimedPlan, correction_for
from pipetransformer.mesh import SINGLE, StageMesh


@dataclass(frozen=True)
class AffineTime:
    """Seconds as an affine function of the number of samples: launch overhead and work."""

    fixed_s: float
    per_sample_s: float

    @classmethod
    def through(cls, sizes: tuple[int, int], seconds: tuple[float, float]) -> AffineTime:
        """Returns the line through two measurements; noise must not make either part negative.

        Args:
            sizes: Samples of the smaller and of the larger one, which may be equal.
            seconds: Of both.
        """
        (small, large), (small_s, large_s) = sizes, seconds
        per_sample_s = max((large_s - small_s) / (large - small), 0.0) if large > small else 0.0
        fixed_s = max(large_s - per_sample_s * large, 0.0)
        return cls(fixed_s, (large_s - fixed_s) / large)

    def at(self, num_samples: float) -> float:
        """Returns the seconds of one micro-batch of ``num_samples``."""
        return self.fixed_s + self.per_sample_s * num_samples

    def __add__(self, other: AffineTime) -> AffineTime:
        return AffineTime(self.fixed_s + other.fixed_s, self.per_sample_s + other.per_sample_s)

    def __sub__(self, other: AffineTime) -> AffineTime:
        return AffineTime(self.fixed_s - other.fixed_s, self.per_sample_s - other.per_sample_s)


@dataclass(frozen=True)
class LayerProfile:
    """One measured layer.

    Attributes:
        name: For reports.
        forward: ``F``, per micro-batch.
        input_grad: ``D``, the gradient handed to the layer below.
        weight_grad: ``W``, the gradient of the layer's own parameters beside ``D``.
        lowest_grad: ``L``, the backward pass where no layer below takes a gradient; ``None``: ``W``. Inside a block the
            gradient goes nearly as far down as with ``D``.
        checkpointing: What a pass takes more with activation checkpointing, besides the second forward pass.
        loss_forward: What of ``F`` is the loss's, in the head.
        optimizer_s: One optimizer update of the layer's parameters.
        parameter_bytes: All parameters; those that layers share count in each, because each has a copy.
        fixed_bytes: Those of them that never train, such as the base weights of adapters.
        activation_bytes: Activations kept for backward, per sample, of the longest ones.
        loss_bytes: What the loss of the head keeps in addition, the head's output included. Recomputing does not free
            it.
        output_bytes: The output, per sample of a typical batch.
        peak_forward_bytes: The most that lives in a forward pass without gradient, output included, per sample, of the
            longest ones.
        peak_backward_bytes: The most that a backward pass allocates beside the gradients of parameters that it adds to,
            per sample, of the longest ones.
        peak_backward_fixed_bytes: What it allocates besides, whatever the samples are: the gradient of a parameter
            before it is added.
        autocast_bytes: Copies of the parameters in a type of fewer bytes, while they take a gradient.
        longest_output_bytes: The output of one of the longest samples; ``None``: as of any other.
        counter_bytes: Numbers that the optimizer keeps of each parameter, as its count of steps, while it is active.
        update_bytes: What an update allocates for the moment, for all layers of a device together, as kernels do that
            take all parameters at once.
        peak_update_bytes: What it allocates in addition for one layer at a time.
        untouched_bytes: Gradients of an embedding's rows that no sample of a batch touches; replicas do not sum them.
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
    peak_backward_bytes: int = 0
    autocast_bytes: int = 0
    fixed_bytes: int = 0
    longest_output_bytes: int | None = None
    untouched_bytes: int = 0
    lowest_grad: AffineTime | None = None
    checkpointing: AffineTime = AffineTime(0.0, 0.0)
    peak_backward_fixed_bytes: int = 0
    loss_bytes: int = 0
    counter_bytes: int = 0
    update_bytes: int = 0
    peak_update_bytes: int = 0
    loss_forward: AffineTime = AffineTime(0.0, 0.0)

    @property
    def backward_as_lowest(self) -> AffineTime:
        """``L``: the backward pass of the lowest layer that takes a gradient."""
        return self.weight_grad if self.lowest_grad is None else self.lowest_grad

    @property
    def forward_again(self) -> AffineTime:
        """The second forward pass of activation checkpointing, without the loss, and what that takes itself."""
        return self.forward - self.loss_forward + self.checkpointing

    def seconds(self, num_samples: float) -> float:
        """Returns the seconds of its passes over a micro-batch, forward and both gradients."""
        return (self.forward + self.input_grad + self.weight_grad).at(num_samples)

    def of_rows(self, number: int) -> LayerProfile:
        """Returns the layer that computes several rows for each sample, as far as a forward pass alone goes."""
        forward = AffineTime(self.forward.fixed_s, number * self.forward.per_sample_s)
        return replace(self, forward=forward, peak_forward_bytes=number * self.peak_forward_bytes)

    @property
    def most_output_bytes(self) -> int:
        """The output of a sample, as memory has to have room for it."""
        return self.output_bytes if self.longest_output_bytes is None else self.longest_output_bytes

    @property
    def trainable_bytes(self) -> int:
        """Parameters that get a gradient and optimizer state while the layer is active."""
        return self.parameter_bytes - self.fixed_bytes

    @property
    def summed_bytes(self) -> int:
        """Gradients that replicas all-reduce in a step."""
        return self.trainable_bytes - self.untouched_bytes


class Volume(NamedTuple):
    """Exchanges of one kind in a pass over a micro-batch.

    Attributes:
        number: How many.
        fixed_bytes, sample_bytes: Bytes that a rank receives, whatever the samples and for each of them.
    """

    number: int = 0
    fixed_bytes: float = 0.0
    sample_bytes: float = 0.0


class Traffic(NamedTuple):
    """Exchanges along the axes of a mesh in a pass over a micro-batch.

    Attributes:
        collectives: All-gathers, reduce-scatters and all-reduces.
        messages: Blocks that go around a ring.
    """

    collectives: Volume = Volume()
    messages: Volume = Volume()


@dataclass(frozen=True)
class LayerShard:
    """A layer of which the ranks of a mesh have parts, as one of them measured its own.

    Attributes:
        layer: The part, its exchanges taking no time. A sample is one of those that each rank computes.
        forward, input_grad, weight_grad, lowest_grad: The exchanges of each pass.
        copied_bytes: Bytes of parameters that train of which several ranks of the mesh have copies, as
            ``(ranks, bytes)``. Their gradients are summed once a step.
    """

    layer: LayerProfile
    forward: Traffic
    input_grad: Traffic
    weight_grad: Traffic
    lowest_grad: Traffic
    copied_bytes: tuple[tuple[int, int], ...] = ()


class MeshProfile(NamedTuple):
    """A model on a mesh.

    Attributes:
        exchange: Seconds of an exchange besides its bytes, between parts of a block: the link's latency, what the ranks
            wait for each other, and what a gather or a reduce-scatter takes more than the link's all-reduce. ``None``
            where only the link is known.
    """

    mesh: StageMesh
    layers: tuple[LayerShard, ...]
    exchange: AffineTime | None = None


@dataclass(frozen=True)
class Profile:
    """A measured model.

    Attributes:
        layers: Embedding first and head last.
        optimizer_state_factor: The optimizer's bytes per parameter byte (2 for Adam).
        cache_read_s_per_byte: Seconds until a cached output is on the device; 0 where it is prefetched.
        cache_read_fixed_s: The same of a batch besides its bytes.
        cache_miss_rate: Fraction of the samples that the cache cannot hold; they go through the frozen layers.
        schedule_overhead_s: Seconds of the schedule itself, per micro-batch and neighbour of a stage, besides layers
            and transfers. A stage between others has two, with each of which it exchanges messages.
        gpipe_overhead_s: The same with GPipe; ``None``: as with other schedules.
        sharding_overhead_s, sharding_s_per_byte: Seconds of FSDP itself besides its collectives' links, per layer and
            micro-batch, and in addition per byte of the layer's parameters.
        step_overhead_s: Seconds of a step that no plan changes: norms, clipping, sums over the ranks, bookkeeping.
        waiting_s: Seconds that devices wait for each other at the end of a step, where several run a plan, besides what
            the all-reduce takes while all are ready.
        read: Reading a replica's batch where no cache is read, before the first layer.
        read_besides: The same without the inputs, where a cache is read: sampling, random keys, targets, what goes to
            every layer. No worker reads them ahead.
        fill_read_s: Reading a sample's input, for which its rank waits: in a fill of the cache from the input, and in a
            step of what the cache misses.
        contention: Seconds of a layer while all devices of a node compute, over those while one does, at least 1: they
            may share cores and memory. The layers' times are those while all do.
        timed: Plans whose first steps have been compared with their prediction, the last one at the end.
        meshes: The layers on each mesh that a plan may have.
        kind: Of all layouts of this profile; ``None``: by their grid of devices.
        host_copy_s_per_byte: Seconds of a copy between host memory and the device.
        is_on_host: Weights, gradients and optimizer state lie in host memory, see
            :func:`~pipetransformer.autopipe.offload.on_host`.
        input_bytes: A sample as the embedding takes it, with what goes to every layer and to the loss.
        copied_bytes: Where the layers are the parts of a rank of a mesh, the bytes of each layer's parameters that
            train of which other ranks have copies; ``None`` without a mesh.
        whole: On a mesh the layers in one piece, as each rank borrows them for what the cache lacks. A sample is the
            rows that a rank reads for one that it computes.
    """

    layers: tuple[LayerProfile, ...]
    optimizer_state_factor: float
    cache_read_s_per_byte: float = 0.0
    cache_miss_rate: float = 0.0
    schedule_overhead_s: float = 0.0
    sharding_overhead_s: float = 0.0
    sharding_s_per_byte: float = 0.0
    step_overhead_s: float = 0.0
    waiting_s: float = 0.0
    read: AffineTime = AffineTime(0.0, 0.0)
    fill_read_s: float = 0.0
    contention: float = 1.0
    timed: tuple[TimedPlan, ...] = ()
    meshes: tuple[MeshProfile, ...] = ()
    kind: LayoutKind | None = None
    host_copy_s_per_byte: float = 0.0
    is_on_host: bool = False
    input_bytes: int = 0
    copied_bytes: tuple[int, ...] | None = None
    gpipe_overhead_s: float | None = None
    read_besides: AffineTime = AffineTime(0.0, 0.0)
    cache_read_fixed_s: float = 0.0
    whole: tuple[LayerProfile, ...] = ()

    def overhead_s(self, schedule: str) -> float:
        """Returns the seconds of a schedule itself per micro-batch and neighbour of a stage."""
        if schedule != "gpipe" or self.gpipe_overhead_s is None:
            return self.schedule_overhead_s
        return self.gpipe_overhead_s

    def on(self, mesh: StageMesh) -> MeshProfile:
        """Returns the model on a mesh that has been measured."""
        return next(known for known in self.meshes if known.mesh == mesh)

    def sharded(self, mesh: StageMesh) -> Profile:
        """Returns the profile of a rank's part of each layer, without the exchanges; itself where there is no mesh."""
        if mesh == SINGLE:
            return self
        shards = self.on(mesh).layers
        copied = tuple(sum(num_bytes for _, num_bytes in shard.copied_bytes) for shard in shards)
        whole = tuple(layer.of_rows(mesh.rows_multiple) for layer in self.layers)
        return replace(self, layers=tuple(shard.layer for shard in shards), copied_bytes=copied, whole=whole)

    def relief(self, num_busy: int, node_size: int) -> float:
        """Returns the seconds of a layer while fewer devices compute, over those while all of a node do; at most 1.

        It is a line from one device to all those of a node.
        """
        if node_size == 1 or num_busy >= node_size:
            return 1.0
        return (1 + (self.contention - 1) * (num_busy - 1) / (node_size - 1)) / self.contention

    def with_timed(self, plan: TimedPlan) -> Profile:
        """Returns the profile that knows of a timed plan, in place of an older time of one alike."""
        others = (known for known in self.timed if known[:3] != plan[:3])
        return replace(self, timed=(*others, plan))

    def correction(self, kind: LayoutKind, is_cached: bool = False) -> Correction:
        """Returns the correction of the predictions for a kind of layout; see :func:`correction_for`."""
        return correction_for(kind, is_cached, self.timed)


class PrefixSums:
    """Sums over contiguous layers, ``first`` and ``last`` included, in constant time."""

    def __init__(self, values: Iterable[float]) -> None:
        self._below = [0.0, *accumulate(values)]

    def __call__(self, first: int, last: int) -> float:
        return self._below[last + 1] - self._below[first]

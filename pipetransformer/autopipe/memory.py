"""The memory model: bytes per device, from measured layers."""

from collections.abc import Sequence
from math import ceil
from operator import mul
from typing import NamedTuple

from pipetransformer.autopipe.cost import layers_with_grad
from pipetransformer.autopipe.offload import on_host
from pipetransformer.autopipe.plan import Plan, Stages, layer_above
from pipetransformer.autopipe.profile import PrefixSums, Profile
from pipetransformer.autopipe.schedules import SCHEDULES, Moment

BATCHES_AHEAD = 2  # that are read from the cache besides the one of the step
BUCKET_BYTES = 1 << 20  # small gradients are all-reduced together; larger ones in place


class Load(NamedTuple):
    """Bytes that a stage adds to a device.

    Attributes:
        saved: For backward, of each micro-batch in flight.
        gradients: Once a micro-batch has been through backward.
        forward: The working memory of a frozen layer; what its micro-batch saves above is not there yet.
        first_backward, backward: That of a backward pass, which frees what is saved from the top down; the first one
            makes the gradients meanwhile.
    """

    saved: float
    gradients: float
    forward: float
    first_backward: float
    backward: float


class MemoryCosts:
    """Bytes of a device that runs one stage or several.

    They are the sum of

    - the weights of all its layers; optimizer state and autocast copies of the active ones;
    - the buckets of DistributedDataParallel, as large as the gradients, where replicas of a single stage have no mesh;
    - at the worst moment of the step, gradients, activations and working memory, see below;
    - the inputs and targets of all micro-batches;
    - for each micro-batch the buffers of the tensor from below and of its gradient, of the gradient from above, and
      while it is in flight of the output. The output of a frozen layer gets no gradient;
    - where the cache is read, the batches that are read ahead;
    - the budget of chunks in place of weights, gradients and optimizer state, where those lie in host memory;
    - where the cache is partial, the weights of the cached layers, whole ones on a mesh too, and of chunks those of one
      layer at a time; and before the step the working memory of one of them for all samples of the replica.

    A stage has gradients from its first backward pass on; with one micro-batch in DistributedDataParallel they are
    views of the buckets. The activations of active layers for backward are there for each micro-batch in flight. When
    recomputing, an active layer keeps its input, and one layer at a time all that its backward needs. One layer at a
    time has its working memory, in the forward pass of a frozen one and the backward pass of an active one. After the
    passes there are gradients alone, and where pipelines or copies of a mesh sum theirs a bucket of them; then what the
    update takes for the moment.

    Samples count as long as the longest one: any batch may have it, and is padded to it.
    """

    def __init__(self, profile: Profile, num_frozen: int, recompute: bool = False, cache_level: int = 0) -> None:
        self._head = len(profile.layers) - 1
        layers, here = layers_with_grad(profile, num_frozen), not profile.is_on_host
        inputs = [0, *(layer.most_output_bytes for layer in profile.layers[:-1])]
        kept = inputs if recompute else [layer.activation_bytes for layer in profile.layers]
        saved = [num_bytes + layer.loss_bytes for num_bytes, layer in zip(kept, profile.layers, strict=True)]
        self._weights = [layer.parameter_bytes * here for layer in profile.layers]
        factor = profile.optimizer_state_factor
        state = ((layer.trainable_bytes * factor + layer.counter_bytes) * on * here for layer, on in layers)
        self._lasting = PrefixSums(map(sum, zip(self._weights, state, strict=True)))
        self._casts = PrefixSums(layer.autocast_bytes * on for layer, on in layers)
        self._gradients = PrefixSums(layer.trainable_bytes * on * here for layer, on in layers)
        self._first, self._first_active = layer_above(cache_level), layer_above(num_frozen)
        self._saved = PrefixSums(num_bytes * on for num_bytes, (_, on) in zip(saved, layers, strict=True))
        self._forward = [layer.peak_forward_bytes * (not on) for layer, on in layers]
        again = [layer.activation_bytes * on * recompute for layer, on in layers]
        self._backward = [
            layer.peak_backward_bytes * on + max(0, made - num_bytes)  # the input is there already
            for made, num_bytes, (layer, on) in zip(again, inputs, layers, strict=True)
        ]
        self._updates = PrefixSums(layer.update_bytes * on * here for layer, on in layers)
        self._one_update = [layer.peak_update_bytes * on * here for layer, on in layers]
        self._fixed = [layer.peak_backward_fixed_bytes * on for layer, on in layers]
        cached = (profile.whole or profile.layers)[: layer_above(cache_level)] if profile.cache_miss_rate else ()
        lent = [layer.parameter_bytes for layer in cached]
        self._cached = max([0, *lent]) if profile.is_on_host else sum(lent)
        self._missing = max([0, *(layer.peak_forward_bytes for layer in cached)])
        copied = profile.copied_bytes or (0,) * len(layers)
        self._copied = PrefixSums(num_bytes * on * here for num_bytes, (_, on) in zip(copied, layers, strict=True))
        self._may_have_ddp = profile.copied_bytes is None and here
        self._input, self._ahead = profile.input_bytes, BATCHES_AHEAD * (cache_level > 0)
        # one size for all boundaries, so that a shorter stage never needs more
        self._boundary = max(layer.most_output_bytes for layer in profile.layers[:-1])

    def bytes(
        self, stages: Stages, num_samples: int, num_microbatches: int, moments: Sequence[Moment], num_replicas: int
    ) -> int:  # fmt: skip
        """Returns the bytes of a device.

        Args:
            stages: The stages of the device, or only its lowest ones.
            num_samples: Samples of a micro-batch.
            num_microbatches: Micro-batches of a step.
            moments: When the device may take most, by the schedule.
            num_replicas: Replicas that all-reduce the gradients.
        """
        is_whole = (stages[0][0], stages[0][-1]) == (self._first, self._head)
        has_ddp = is_whole and num_replicas > 1 and self._may_have_ddp
        loads = [self._load(first, last, num_samples) for first, last in stages]
        gradients = sum(load.gradients for load in loads)
        held = self._cached + sum(self._held(first, last) for first, last in stages) + has_ddp * gradients
        if has_ddp and num_microbatches == 1:  # a gradient that is made is copied to its bucket
            loads = [load._replace(gradients=0.0, first_backward=load.backward) for load in loads]
        summed = gradients if num_replicas > 1 else sum(self._copied(first, last) for first, last in stages)
        bucket = min(BUCKET_BYTES, summed) * (not has_ddp)
        after = sum(load.gradients for load in loads) + max(bucket, self._update(stages))
        num_tensors = 0
        for index, (first, last) in enumerate(stages):
            sent = max(moment.in_flight[index] for moment in moments) + num_microbatches * (last >= self._first_active)
            received = num_microbatches * (1 + (first > self._first_active))
            ahead = num_microbatches * self._ahead * (first == self._first)
            num_tensors += (first > 0) * received + (last < self._head) * sent + ahead
        missing = self._missing * num_microbatches * num_samples
        running = max(missing, after, *(at(moment, loads) for moment in moments))
        inputs = self._input * num_samples * num_microbatches
        return round(held + running + self.buffer_bytes(num_tensors, num_samples) + inputs)

    def _update(self, stages: Stages) -> float:
        """Returns what an update of the active layers allocates for the moment."""
        together = sum(self._updates(first, last) for first, last in stages)
        return together + max(max(self._one_update[first : last + 1]) for first, last in stages)

    def _load(self, first: int, last: int, num_samples: int) -> Load:
        saved, gradients = self._saved(first, last) * num_samples, self._gradients(first, last)
        forward = max(self._forward[first : last + 1]) * num_samples
        backward, first_backward = 0.0, 0.0
        for layer in range(max(first, self._first_active), last + 1):
            turn = self._fixed[layer] + self._backward[layer] * num_samples
            freed = self._saved(layer + 1, last) * num_samples
            backward = max(backward, turn)
            first_backward = max(first_backward, turn - freed + self._gradients(layer, last))
        return Load(saved, gradients, max(0.0, forward - saved), first_backward, backward)

    def fsdp_bytes(self, first: int, num_devices: int, num_samples: int, num_microbatches: int) -> int:
        """Returns the bytes of each device under FSDP, with ``first`` the lowest layer that runs.

        A shard of weights and optimizer state, cached layers included; autocast copies, which backward needs whole; the
        input of all micro-batches. At a layer's turn its weights and gradient are whole, or its weights twice during
        the all-gather. With them there are a shard of the gradients that are made, of all layers from the second
        micro-batch on; the prefetched weights of the next layer and the gradient of the one before in its
        reduce-scatter; and the activations of the active layers up to it for one micro-batch and the working memory of
        its backward pass, or that of a frozen layer's forward pass. After the passes there is what an update of the
        shards takes for the moment.
        """
        around = [0, *self._weights[first:], 0]
        gradients = self._gradients(0, self._head)
        peak = (gradients + self._update(((0, self._head),))) / num_devices
        for layer in range(first, self._head + 1):
            below, own, above = around[layer - first : layer - first + 3]
            is_active = layer >= self._first_active
            kept = self._saved(first, layer) + self._backward[layer]
            activations = (kept if is_active else self._forward[layer]) * num_samples
            made = self._gradients(layer + 1, self._head) * is_active if num_microbatches == 1 else gradients
            peak = max(peak, below + 2 * own + above + activations + made / num_devices)
        inputs = self.buffer_bytes((first > 0) * num_microbatches * (1 + self._ahead), num_samples)
        casts = self._casts(first, self._head)
        return ceil(self._lasting(0, self._head) / num_devices + casts + peak + inputs)

    def layer_bytes(self, layer: int, num_samples: int, has_gradients: bool) -> float:
        """Returns the bytes that a layer adds to any device, with ``num_samples`` in flight."""
        gradients = self._gradients(layer, layer) * has_gradients
        return self._held(layer, layer) + gradients + self._saved(layer, layer) * num_samples

    def _held(self, first: int, last: int) -> float:
        return self._lasting(first, last) + self._casts(first, last)

    def buffer_bytes(self, num_tensors: int, num_samples: int) -> int:
        """Returns the bytes of tensors between stages, of ``num_samples`` each."""
        return num_tensors * self._boundary * num_samples


def at(moment: Moment, loads: Sequence[Load]) -> float:
    """Returns the bytes of gradients, activations and working memory in a backward pass, or the forward before it."""
    held = sum(load.gradients for load, made in zip(loads, moment.has_gradients, strict=False) if made)
    held += sum(map(mul, moment.in_flight, (load.saved for load in loads)))
    turn = max(load.forward for load in loads)
    if moment.stage < len(loads):
        own = loads[moment.stage]
        turn = max(turn, own.backward if moment.has_gradients[moment.stage] else own.first_backward)
    return held + turn


def device_memory_bytes(profile: Profile, plan: Plan, batch_size: int) -> tuple[int, ...]:
    """Returns the bytes of each device of a pipeline; see :class:`MemoryCosts`. With a mesh those of each rank."""
    profile = on_host(profile) if plan.chunk_bytes else profile.sharded(plan.mesh)
    costs = MemoryCosts(profile, plan.num_frozen, plan.recompute, plan.cache_level)
    num_samples, num_microbatches = plan.microbatch_size(batch_size) // plan.mesh.rows_multiple, plan.num_microbatches
    if plan.fsdp:
        return (costs.fsdp_bytes(plan.first_layer, plan.num_replicas, num_samples, num_microbatches),)
    return tuple(
        costs.bytes(
            plan.stages[device :: plan.pipeline_size],
            num_samples,
            num_microbatches,
            SCHEDULES[plan.schedule].moments(device, plan),
            plan.num_replicas,
        )
        + plan.chunk_bytes
        for device in range(plan.pipeline_size)
    )

"""The memory model: bytes per device, from measured layers."""

from math import ceil
from operator import add, mul

from pipetransformer.autopipe.cost import layers_with_grad
from pipetransformer.autopipe.offload import on_host
from pipetransformer.autopipe.plan import Plan, Stages, layer_above
from pipetransformer.autopipe.profile import PrefixSums, Profile
from pipetransformer.autopipe.schedules import SCHEDULES, Moments

BUCKET_BYTES = 1 << 20  # small gradients of a pipeline are all-reduced together; larger ones in place


class MemoryCosts:
    """Bytes of a device that runs one stage or several.

    They are the sum of

    - the weights of all its layers; gradients, optimizer state and autocast copies of the active ones;
    - those gradients once more where replicas of a single stage accumulate several micro-batches, which DDP does beside
      its buckets; or a bucket of them after the passes of a pipeline;
    - the activations of active layers for backward, for each micro-batch in flight. When recomputing, an active layer
      keeps its input, and one layer at a time all that its backward needs;
    - the working memory of one layer at a time, in the forward pass of a frozen one and the backward pass of an active
      one;
    - the inputs of all micro-batches;
    - for each micro-batch the buffers of the tensor from below and of its gradient, of the gradient from above, and
      while it is in flight of the output. The output of a frozen layer gets no gradient;
    - the budget of chunks in place of weights, gradients and optimizer state, where those lie in host memory;
    - where the cache is partial, the weights of the cached layers, and before the step the working memory of one of
      them for all samples of the replica.

    Samples count as long as the longest one: any batch may have it, and is padded to it.

    Gradients count from the beginning of the step. So where all micro-batches are in flight before the first backward
    pass, this is more than a device takes, by no more than its gradients.
    """

    def __init__(self, profile: Profile, num_frozen: int, recompute: bool = False, cache_level: int = 0) -> None:
        state_factor = 1 + profile.optimizer_state_factor
        self._head = len(profile.layers) - 1
        layers = layers_with_grad(profile, num_frozen)
        inputs = [0, *(layer.most_output_bytes for layer in profile.layers[:-1])]
        saved = inputs if recompute else [layer.activation_bytes for layer in profile.layers]
        here = not profile.is_on_host
        self._weights = [layer.parameter_bytes * here for layer in profile.layers]
        self._lasting = PrefixSums(
            (layer.parameter_bytes + layer.trainable_bytes * state_factor * on) * here for layer, on in layers
        )
        self._casts = PrefixSums(layer.autocast_bytes * on for layer, on in layers)
        self._gradients = PrefixSums(layer.trainable_bytes * on * here for layer, on in layers)
        self._first, self._first_active = layer_above(cache_level), layer_above(num_frozen)
        self._working = [layer.peak_backward_bytes if on else layer.peak_forward_bytes for layer, on in layers]
        self._saved = PrefixSums(num_bytes * on for num_bytes, (_, on) in zip(saved, layers, strict=True))
        self._again = [layer.activation_bytes * on * recompute for layer, on in layers]
        self._turn = [*map(add, self._working, self._again)]
        cached = profile.layers[: layer_above(cache_level)] if profile.cache_miss_rate else ()
        self._cached = sum(layer.parameter_bytes for layer in cached) * here
        self._missing = max([0, *(layer.peak_forward_bytes for layer in cached)])
        self._input = profile.input_bytes
        # one size for all boundaries, so that a shorter stage never needs more
        self._boundary = max(layer.most_output_bytes for layer in profile.layers[:-1])

    def bytes(
        self, stages: Stages, num_samples: int, num_microbatches: int, moments: Moments, num_replicas: int
    ) -> int:  # fmt: skip
        """Returns the bytes of a device.

        Args:
            stages: The stages of the device, or only its lowest ones.
            num_samples: Samples of a micro-batch.
            num_microbatches: Micro-batches of a step.
            moments: The micro-batches in flight in each stage, by the schedule.
            num_replicas: Replicas that all-reduce the gradients.
        """
        held, turn, num_tensors = float(self._cached), 0.0, 0
        saved = []
        is_whole = (stages[0][0], stages[0][-1]) == (self._first, self._head)
        accumulates = is_whole and num_replicas > 1 and num_microbatches > 1
        for index, (first, last) in enumerate(stages):
            held += self._held(first, last) + accumulates * self._gradients(first, last)
            saved.append(self._saved(first, last))
            sent = max(moment[index] for moment in moments) + num_microbatches * (last >= self._first_active)
            received = num_microbatches * (1 + (first > self._first_active))
            num_tensors += (first > 0) * received + (last < self._head) * sent
            turn = max(turn, *self._turn[first : last + 1])
        in_flight = max([sum(map(mul, saved, moment)) for moment in moments])
        buffers = self.buffer_bytes(num_tensors, num_samples)
        running = max(in_flight + turn, self._missing * num_microbatches) * num_samples
        if num_replicas > 1 and not is_whole:
            running = max(running, min(BUCKET_BYTES, sum(self._gradients(first, last) for first, last in stages)))
        return round(held + running + buffers + self._input * num_samples * num_microbatches)

    def fsdp_bytes(self, first: int, num_devices: int, num_samples: int, num_microbatches: int) -> int:
        """Returns the bytes of each device under FSDP, with ``first`` the lowest layer that runs.

        A shard of weights, gradients and optimizer state, cached layers included; autocast copies, which backward needs
        whole; the input of all micro-batches. At a layer's turn its weights and gradient are whole, or its weights
        twice during the all-gather. With them there are the prefetched weights of the next layer and the gradient of
        the one before in its reduce-scatter; and the activations of the active layers up to it for one micro-batch, or
        the working memory of a frozen layer.
        """
        around = [0, *self._weights[first:], 0]
        peak = 0.0
        for layer in range(first, self._head + 1):
            below, own, above = around[layer - first : layer - first + 3]
            kept = self._saved(first, layer) + self._again[layer]
            activations = (kept if layer >= self._first_active else self._working[layer]) * num_samples
            peak = max(peak, below + 2 * own + above + activations)
        inputs = self.buffer_bytes((first > 0) * num_microbatches, num_samples)
        casts = self._casts(first, self._head)
        return ceil(self._lasting(0, self._head) / num_devices + casts + peak + inputs)

    def layer_bytes(self, layer: int, num_samples: int) -> float:
        """Returns the bytes that a layer adds to any device, with ``num_samples`` in flight."""
        return self._held(layer, layer) + self._saved(layer, layer) * num_samples

    def _held(self, first: int, last: int) -> float:
        return self._lasting(first, last) + self._casts(first, last)

    def buffer_bytes(self, num_tensors: int, num_samples: int) -> int:
        """Returns the bytes of tensors between stages, of ``num_samples`` each."""
        return num_tensors * self._boundary * num_samples


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
            SCHEDULES[plan.schedule].in_flight(device, plan),
            plan.num_replicas,
        )
        + plan.chunk_bytes
        for device in range(plan.pipeline_size)
    )

"""What a plan needs: bytes per device, from measured layers."""

from math import ceil
from operator import mul

from pipetransformer.autopipe.cost import PrefixSums, Profile, layers_with_grad
from pipetransformer.autopipe.plan import Plan, Stages, layer_above
from pipetransformer.autopipe.schedules import SCHEDULES, Moments

BUCKET_BYTES = 1 << 20  # gradients of a pipeline that are averaged together; larger ones are where they lie


class MemoryCosts:
    """Bytes on the device that holds one or more runs of layers.

    Weights of all its layers; gradients, optimizer state and casts of the active ones, and their gradients once more
    where replicas of a single stage average what several micro-batches add up to (DDP does that beside its buckets), or
    a pack of them after the passes of a pipeline; what the active ones save for backward, for each micro-batch in
    flight; what one frozen layer at a time needs to run; for each micro-batch the tensor that comes from below and the
    one that goes up, for which the pipeline keeps buffers (what goes up from a frozen layer gets no gradient and is
    kept in flight only). With activation checkpointing an active layer saves its input, and one layer at a time all
    that its backward needs. Where the cache has no room for all samples, every device has the weights of the cached
    layers, too, and before the step what one of them needs to run for the whole share.

    Gradients count from the beginning of the step, so where all micro-batches are in flight before the first backward
    pass this is more than a device takes, by no more than its gradients.
    """

    def __init__(self, profile: Profile, num_frozen: int, recompute: bool = False, cache_level: int = 0) -> None:
        state_factor = 1 + profile.optimizer_state_factor
        self._head = len(profile.layers) - 1
        layers = layers_with_grad(profile, num_frozen)
        inputs = [0, *(layer.output_bytes for layer in profile.layers[:-1])]
        saved = inputs if recompute else [layer.activation_bytes for layer in profile.layers]
        self._weights = [layer.parameter_bytes for layer in profile.layers]
        self._lasting = PrefixSums(layer.parameter_bytes * (1 + state_factor * on) for layer, on in layers)
        self._casts = PrefixSums(layer.autocast_bytes * on for layer, on in layers)
        self._gradients = PrefixSums(layer.parameter_bytes * on for layer, on in layers)
        self._first, self._first_active = layer_above(cache_level), layer_above(num_frozen)
        self._working = max([0, *(layer.peak_forward_bytes for layer, on in layers if not on)])
        self._saved = PrefixSums(num_bytes * on for num_bytes, (_, on) in zip(saved, layers, strict=True))
        self._checkpoint = recompute
        self._again = [layer.activation_bytes * on for layer, on in layers]
        cached = profile.layers[: layer_above(cache_level)] if profile.cache_miss_rate else ()
        self._cached = sum(layer.parameter_bytes for layer in cached)
        self._missing = max([0, *(layer.peak_forward_bytes for layer in cached)])
        # one size for all boundaries, so that a shorter run never needs more
        self._boundary = max(layer.output_bytes for layer in profile.layers[:-1])

    def bytes(
        self, runs: Stages, num_samples: int, num_microbatches: int, moments: Moments, num_replicas: int
    ) -> int:  # fmt: skip
        """Bytes with ``num_microbatches`` of ``num_samples`` each; ``runs`` may be the lowest chunks of a device."""
        held, again, num_tensors = float(self._cached), 0, 0
        saved = []
        is_whole = (runs[0][0], runs[0][-1]) == (self._first, self._head)
        adds_up = is_whole and num_replicas > 1 and num_microbatches > 1
        working = self._working * any(first < self._first_active for first, _ in runs)
        for chunk, (first, last) in enumerate(runs):
            held += self._held(first, last) + adds_up * self._gradients(first, last)
            saved.append(self._saved(first, last))
            sent = num_microbatches if last >= self._first_active else max(moment[chunk] for moment in moments)
            num_tensors += (first > 0) * num_microbatches + (last < self._head) * sent
            if self._checkpoint:
                again = max(again, *self._again[first : last + 1])
        in_flight = max([sum(map(mul, saved, moment)) for moment in moments])
        buffers = self.buffer_bytes(num_tensors, num_samples)
        running = max(in_flight + again + working, self._missing * num_microbatches) * num_samples
        if num_replicas > 1 and not is_whole:
            running = max(running, min(BUCKET_BYTES, sum(self._gradients(first, last) for first, last in runs)))
        return round(held + running + buffers)

    def fsdp_bytes(self, first: int, num_devices: int, num_samples: int, num_microbatches: int) -> int:
        """Bytes on each device of a sharded plan, with ``first`` the lowest layer that runs.

        A share of all that lasts, cached layers included; what is cast, which backward needs whole; the input, read for
        all micro-batches. At a layer's turn its weights and gradient are whole, or its weights twice as they come in;
        with them the weights of the layer that is fetched ahead and the gradient of the one before, which is on its
        way; what the active layers up to it have saved of one micro-batch, or what a frozen layer needs to run.
        """
        around = [0, *self._weights[first:], 0]
        peak = 0.0
        for layer in range(first, self._head + 1):
            below, own, above = around[layer - first : layer - first + 3]
            kept = self._saved(first, layer) + self._checkpoint * self._again[layer]
            activations = (kept if layer >= self._first_active else self._working) * num_samples
            peak = max(peak, below + 2 * own + above + activations)
        inputs = self.buffer_bytes((first > 0) * num_microbatches, num_samples)
        casts = self._casts(first, self._head)
        return ceil(self._lasting(0, self._head) / num_devices + casts + peak + inputs)

    def layer_bytes(self, layer: int, num_samples: int) -> float:
        """What a layer adds wherever it is put, with ``num_samples`` between forward and backward."""
        return self._held(layer, layer) + self._saved(layer, layer) * num_samples

    def _held(self, first: int, last: int) -> float:
        return self._lasting(first, last) + self._casts(first, last)

    def buffer_bytes(self, num_tensors: int, num_samples: int) -> int:
        """What that many tensors between layers take, of ``num_samples`` each."""
        return num_tensors * self._boundary * num_samples


def device_memory_bytes(profile: Profile, plan: Plan, batch_size: int) -> tuple[int, ...]:
    """Bytes on each device of a pipeline; see :class:`MemoryCosts`."""
    costs = MemoryCosts(profile, plan.num_frozen, plan.recompute, plan.cache_level)
    num_samples, num_microbatches = plan.microbatch_size(batch_size), plan.num_microbatches
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
        for device in range(plan.pipeline_size)
    )

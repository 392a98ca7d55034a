"""Measures the layers once, before the first plan."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.profiling.memory import AutocastCopies, Kept, kept_of
from pipetransformer.profiling.overhead import mean_over_ranks, measure_contention, measure_waiting
from pipetransformer.profiling.passes import (
    Runs,
    has_input_grad,
    kept,
    loss_of_rows,
    measure,
    passes,
    peak,
    trainable,
)
from pipetransformer.profiling.update import IdleUpdate, measure_idle_update, measure_update
from pipetransformer.runtime.batch import Batch, SampleLoss
from pipetransformer.runtime.embedding_gradients import embedding_weights, untouched_bytes
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.rng import MakeRandomness, PerSampleRng, make_randomness


class WholeLayer:
    """A layer that one rank has whole.

    Args:
        layer: With storage.
        index: In the model.
        precision: The types in which it computes.
        randomness: Makes its random numbers.
        loss: Of the head; ``None`` for a layer below.
    """

    def __init__(
        self, layer: nn.Module, index: int, precision: Precision, randomness: MakeRandomness,
        loss: SampleLoss | None = None,
    ) -> None:  # fmt: skip
        self.module, self._index, self._precision, self._randomness = layer, index, precision, randomness
        self.draws_by_sample = randomness is PerSampleRng
        self.loss = None if loss is None else partial(loss_of_rows, loss, _all_rows)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        with self._randomness(batch.keys) as numbers:
            numbers.layer(self._index)
            return self._precision.run_layer(self.module, x, batch.context)


def _all_rows(rows: Tensor) -> Tensor:
    """Returns all rows of a batch: one rank computes them."""
    return rows


Batches = Sequence[Batch]
"""A small and a large batch, which separate the fixed from the per-sample time. Where samples differ in length, the
longest one once and twice as well, for the bytes."""


def profile(
    stack: LayerStack, loss: SampleLoss, batches: Batches, optimizer: OptimizerSpec, device: torch.device,
    precision: Precision, devices_per_node: int = 1, randomness: str = "sample",
) -> Profile:  # fmt: skip
    """Measures every kind of layer once (blocks of one shape are alike) and averages over the ranks. All ranks call it.

    The head is measured with the loss, which over a vocabulary keeps and makes several times the head's output.

    All ranks measure at the same time, as they compute in a step. What one takes by itself, and what they wait for each
    other, is measured on a block.

    Args:
        stack: The model; layers without storage are loaded one at a time.
        loss: Of the head's output.
        batches: With inputs and targets.
        optimizer: Builds the optimizer whose update is timed.
        device: The device that computes.
        precision: The types in which the layers compute.
        devices_per_node: Ranks that may share cores and memory.
        randomness: ``sample`` or ``device``, where dropout gets its numbers.
    """
    known: dict[object, LayerProfile] = {}
    kinds, contention, waiting_s, idle = kinds_of_layers(stack), 1.0, 0.0, measure_idle_update(optimizer, device)
    xs = [batch.inputs for batch in batches if batch.inputs is not None]
    sizes = [len(batch.ids) for batch in batches]
    for index, layer in of_each_kind(stack, device):
        about = precision, make_randomness(randomness, device), loss if index == len(stack) - 1 else None
        runs = WholeLayer(layer, index, *about)
        measured = layer_profile(runs, index, xs, batches, sizes, optimizer, precision, idle)
        embeddings, num_shares = embedding_weights(stack, index, layer), dist.get_world_size()
        measured = with_untouched_bytes(measured, runs, xs[1], batches[1], embeddings, num_shares)
        known[kinds[index]] = measured
        if index == 1:
            wants_grad, pairs = has_input_grad(xs[0], index), zip(xs[:2], batches[:2], strict=True)
            small, large = (passes(runs, *pair, AutocastCopies(layer), wants_grad) for pair in pairs)
            contention = measure_contention(small, device, devices_per_node)
            waiting_s = measure_waiting(large, measured.seconds(sizes[1]), stack.num_blocks, device)
            del small, large
        # the layers above take inputs of this shape; the numbers in them do not matter for the time
        with torch.no_grad():
            layer.eval()
            xs = [precision.run_layer(layer, x, b.context) for x, b in zip(xs, batches, strict=True)]
        del layer, runs  # one at a time, as of_each_kind asks
    layers, state_factor = tuple(known[kind] for kind in kinds), optimizer.state_factor
    longest = batches[-1]  # one of two samples, where they differ in length
    input_bytes = -(-longest.nbytes // len(longest.ids))
    return Profile(layers, state_factor, contention=contention, waiting_s=waiting_s, input_bytes=input_bytes)


def of_each_kind(stack: LayerStack, device: torch.device) -> Iterator[tuple[int, Layer]]:
    """Yields the lowest layer of each kind by its index, as a copy with weights.

    The caller lets go of a copy before it asks for the next: the whole model may be larger than the device.
    """
    seen = set[object]()
    for index, kind in enumerate(kinds_of_layers(stack)):
        if kind not in seen:
            seen.add(kind)
            yield index, _loaded(stack, index, device)


def _loaded(stack: LayerStack, index: int, device: torch.device) -> Layer:
    layer = stack.loaded_copy(index, device).train()
    _fix_weights(layer, stack, index)
    return layer


def _fix_weights(layer: Layer, stack: LayerStack, index: int) -> None:
    """Fixes the parameters of a copy of a layer that are fixed in the stack."""
    own, trained = stack[index].by_name().values(), set(stack.trainable(index, 0))
    for parameter, original in zip(layer.by_name().values(), own, strict=True):
        parameter.requires_grad_(original in trained)


def kinds_of_layers(stack: LayerStack) -> list[object]:
    """Returns for each layer what those have in common that take the same time.

    These are their modules, the shapes of their parameters and which of them train. The head has the loss as well.
    """

    def kind(index: int) -> object:
        trained = set(stack.trainable(index, 0))
        weights = tuple((p.shape, p in trained) for p in stack[index].by_name().values())
        return index == len(stack) - 1, tuple(type(module) for module in stack[index].modules()), weights

    return [kind(index) for index in range(len(stack))]


def layer_profile(
    runs: Runs, index: int, xs: Sequence[Tensor], batches: Batches, sizes: Sequence[int],
    optimizer: OptimizerSpec, precision: Precision, idle: IdleUpdate, has_parts: bool = False,
) -> LayerProfile:  # fmt: skip
    """Measures one layer and averages over the ranks. All ranks call it.

    Args:
        index: In the model.
        xs: What comes from the layer below, of each batch.
        sizes: Samples of each batch, of which a packed row has several.
        idle: See :func:`measure_idle_update`.
        has_parts: Other ranks of a mesh have parts of the parameters.
    """
    layer = runs.module
    small, large = (measure(runs, index, x, batch, precision) for x, batch in zip(xs[:2], batches[:2], strict=True))
    ones = [kept(runs, index, x, batch, precision) for x, batch in zip(xs[2:], batches[2:], strict=True)]
    if ones:
        longest = kept_of(sizes[1], *ones)
    else:
        longest = Kept(large.activation_bytes, large.loss_bytes, large.output_bytes, peak(runs, xs[1], batches[1]))
    longer = longest.activation_bytes / max(1, large.activation_bytes)  # so are the gradients of activations
    few, many = sizes[:2]
    backward = AffineTime(0.0, large.peak_backward_bytes / many)  # in bytes here; of one size all grows with samples
    if few < many:
        backward = AffineTime.through((few, many), (small.peak_backward_bytes, large.peak_backward_bytes))
    names = ("forward_s", "input_grad_s", "weight_grad_s", "lowest_grad_s", "checkpointing_s", "loss_s")
    update = measure_update(trainable(layer), optimizer, has_parts)
    update_s, together = max(0.0, update.seconds - idle.seconds), round(idle.together * update.num_bytes)
    numbers = [getattr(measured, name) for measured in (small, large) for name in names] + [update_s]
    numbers = mean_over_ranks(numbers, xs[0].device)
    forward, input_grad, weight_grad, lowest_grad, checkpointing, loss_forward = (
        AffineTime.through((sizes[0], sizes[1]), (numbers[i], numbers[i + len(names)])) for i in range(len(names))
    )
    return LayerProfile(
        name=type(layer).__name__,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        lowest_grad=lowest_grad,
        checkpointing=checkpointing,
        loss_forward=loss_forward,
        optimizer_s=numbers[-1],
        parameter_bytes=sum(p.numel() * p.element_size() for p in layer.parameters()),
        activation_bytes=longest.activation_bytes // sizes[1],
        loss_bytes=longest.loss_bytes // sizes[1],
        output_bytes=large.output_bytes // sizes[1],
        peak_forward_bytes=longest.peak_forward_bytes // sizes[1],
        peak_backward_bytes=round(longer * backward.per_sample_s),
        autocast_bytes=large.autocast_bytes,
        fixed_bytes=sum(p.nbytes for p in layer.parameters() if not p.requires_grad),
        longest_output_bytes=longest.output_bytes // sizes[1] if ones else None,
        peak_backward_fixed_bytes=round(backward.fixed_s),
        counter_bytes=update.counter_bytes,
        update_bytes=together,
        peak_update_bytes=update.num_bytes - together,
    )


def with_untouched_bytes(
    measured: LayerProfile, runs: Runs, x: Tensor, batch: Batch, embeddings: Sequence[nn.Parameter], num_shares: int
) -> LayerProfile:
    """Measures the bytes of embeddings' gradients that replicas do not sum. All ranks call it.

    Args:
        x, batch: A device's share of a global batch.
        embeddings: Of the layer, see :func:`~pipetransformer.runtime.embedding_gradients.embedding_weights`.
        num_shares: How many there are in a global batch.
    """
    if not embeddings:
        return measured
    total = runs(x, batch).sum()
    if total.requires_grad:
        total.backward()
    untouched = untouched_bytes(embeddings, num_shares)
    runs.module.zero_grad(set_to_none=True)
    return replace(measured, untouched_bytes=round(mean_over_ranks([untouched], x.device)[0]))

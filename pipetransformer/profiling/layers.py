"""Measures the layers once, before the first plan."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.profiling.memory import AutocastCopies, Kept, count_saved_bytes, kept_of, peak_forward_bytes
from pipetransformer.profiling.overhead import measure_contention, measure_waiting
from pipetransformer.profiling.timing import timed, typical, until_settled
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.embedding_gradients import embedding_weights, untouched_bytes
from pipetransformer.runtime.gradients import squared_gradient_norms, unscale_and_clip
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.rng import MakeRandomness, PerSampleRng, RefuseOtherRandomness, make_randomness

LONG_PASS_S = 0.05  # of a layer, forward and backward; checkpointing itself takes less than a millisecond


@dataclass(frozen=True)
class Measured:
    """Measurements of one layer at one batch size, in seconds and bytes."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    lowest_grad_s: float
    checkpointing_s: float
    activation_bytes: int
    autocast_bytes: int
    output_bytes: int


class Runs(Protocol):
    """A layer as it runs in a step.

    Attributes:
        module: Has the layer's parameters.
        draws_by_sample: Its random numbers have to come from its samples' streams.
    """

    module: nn.Module
    draws_by_sample: bool

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Runs it forward, in training with the numbers that its samples draw."""
        ...


class WholeLayer:
    """A layer that one rank has whole.

    Args:
        layer: With storage.
        index: In the model.
        precision: The types in which it computes.
        randomness: Makes its random numbers.
    """

    def __init__(self, layer: nn.Module, index: int, precision: Precision, randomness: MakeRandomness) -> None:
        self.module, self._index, self._precision, self._randomness = layer, index, precision, randomness
        self.draws_by_sample = randomness is PerSampleRng

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        with self._randomness(batch.keys) as numbers:
            numbers.layer(self._index)
            return self._precision.run_layer(self.module, x, batch.context)


Batches = Sequence[Batch]
"""A small and a large batch, which separate the fixed from the per-sample time. Where samples differ in length, the
longest one once and twice as well, for the bytes."""


def profile(
    stack: LayerStack, batches: Batches, optimizer: OptimizerSpec, device: torch.device,
    precision: Precision, devices_per_node: int = 1, randomness: str = "sample",
) -> Profile:  # fmt: skip
    """Measures every kind of layer once (blocks of one shape are alike) and averages over the ranks. All ranks call it.

    All ranks measure at the same time, as they compute in a step. What one takes by itself, and what they wait for each
    other, is measured on a block.

    Args:
        stack: The model; layers without storage are loaded one at a time.
        batches: With inputs.
        optimizer: Builds the optimizer whose update is timed.
        device: The device that computes.
        precision: The types in which the layers compute.
        devices_per_node: Ranks that may share cores and memory.
        randomness: ``sample`` or ``device``, where dropout gets its numbers.
    """
    known: dict[object, LayerProfile] = {}
    contention, waiting_s, update_s = 1.0, 0.0, idle_update_seconds(optimizer, device)
    xs = [batch.inputs for batch in batches if batch.inputs is not None]
    sizes = [len(batch.ids) for batch in batches]
    for index, layer in of_each_kind(stack, device):
        runs = WholeLayer(layer, index, precision, make_randomness(randomness, device))
        measured = layer_profile(runs, index, xs, batches, sizes, optimizer, precision, update_s)
        embeddings, num_shares = embedding_weights(stack, index, layer), dist.get_world_size()
        measured = with_untouched_bytes(measured, runs, xs[1], batches[1], embeddings, num_shares)
        known[kind_of_layer(stack[index])] = measured
        if index == 1:
            small, large = (_once(runs, *pair) for pair in zip(xs[:2], batches[:2], strict=True))
            contention = measure_contention(small, device, devices_per_node)
            waiting_s = measure_waiting(large, measured.seconds(sizes[1]), stack.num_blocks, device)
            del small, large
        # the layers above take inputs of this shape; the numbers in them do not matter for the time
        with torch.no_grad():
            layer.eval()
            xs = [precision.run_layer(layer, x, b.context) for x, b in zip(xs, batches, strict=True)]
        del layer, runs  # one at a time, as of_each_kind asks
    layers, state_factor = tuple(known[kind_of_layer(layer)] for layer in stack.layers), optimizer.state_factor
    return Profile(layers, state_factor, contention=contention, waiting_s=waiting_s)


def of_each_kind(stack: LayerStack, device: torch.device) -> Iterator[tuple[int, Layer]]:
    """Yields the lowest layer of each kind by its index, as a copy with weights.

    The caller lets go of a copy before it asks for the next: the whole model may be larger than the device.
    """
    seen = set[object]()
    for index in range(len(stack)):
        kind = kind_of_layer(stack[index])
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


def kind_of_layer(layer: nn.Module) -> object:
    """Returns what layers have in common that take the same time: their modules and the shapes of their parameters."""
    modules = tuple(type(module) for module in layer.modules())
    return modules, tuple(p.shape for p in layer.parameters())


def trainable(layer: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that take a gradient."""
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def layer_profile(
    runs: Runs, index: int, xs: Sequence[Tensor], batches: Batches, sizes: Sequence[int],
    optimizer: OptimizerSpec, precision: Precision, idle_update_s: float,
) -> LayerProfile:  # fmt: skip
    """Measures one layer and averages over the ranks. All ranks call it.

    Args:
        index: In the model.
        xs: What comes from the layer below, of each batch.
        sizes: Samples of each batch, of which a packed row has several.
        idle_update_s: See :func:`idle_update_seconds`.
    """
    layer = runs.module
    small, large = (_measure(runs, index, x, batch, precision) for x, batch in zip(xs[:2], batches[:2], strict=True))
    ones = [_kept(runs, index, x, batch, precision) for x, batch in zip(xs[2:], batches[2:], strict=True)]
    if ones:
        longest = kept_of(sizes[1], *ones)
    else:
        longest = Kept(large.activation_bytes, large.output_bytes, _peak(runs, xs[1], batches[1]))
    names = ("forward_s", "input_grad_s", "weight_grad_s", "lowest_grad_s", "checkpointing_s")
    update_s = max(0.0, _update_seconds(trainable(layer), optimizer) - idle_update_s)
    numbers = [getattr(measured, name) for measured in (small, large) for name in names] + [update_s]
    numbers = _mean_over_ranks(numbers, xs[0].device)
    forward, input_grad, weight_grad, lowest_grad, checkpointing = (
        AffineTime.through((sizes[0], sizes[1]), (numbers[i], numbers[i + len(names)])) for i in range(len(names))
    )
    return LayerProfile(
        name=type(layer).__name__,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        lowest_grad=lowest_grad,
        checkpointing=checkpointing,
        optimizer_s=numbers[-1],
        parameter_bytes=sum(p.numel() * p.element_size() for p in layer.parameters()),
        activation_bytes=longest.activation_bytes // sizes[1],
        output_bytes=large.output_bytes // sizes[1],
        peak_forward_bytes=longest.peak_forward_bytes // sizes[1],
        autocast_bytes=large.autocast_bytes,
        fixed_bytes=sum(p.nbytes for p in layer.parameters() if not p.requires_grad),
        longest_output_bytes=longest.output_bytes // sizes[1] if ones else None,
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
    return replace(measured, untouched_bytes=round(_mean_over_ranks([untouched], x.device)[0]))


@dataclass(frozen=True)
class _Passes:
    """Seconds of a forward and a backward pass, their output, and the bytes that forward saved for backward."""

    forward_s: float
    backward_s: float
    output: Tensor
    saved_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def has_input_grad(x: Tensor, index: int) -> bool:
    """Returns whether a layer's input takes a gradient where all layers train."""
    return x.is_floating_point() and index > 0


def _passes(runs: Runs, x: Tensor, batch: Batch, copies: AutocastCopies, wants_grad: bool) -> Callable[[], _Passes]:
    """Returns a function that runs a layer forward, and backward as far as a gradient is asked for.

    Args:
        wants_grad: The input takes a gradient.
    """

    def run() -> _Passes:
        leaf = x.detach().requires_grad_(wants_grad)
        with count_saved_bytes(runs.module, copies) as saved:
            forward_s, output = timed(lambda: runs(leaf, batch), x.device)
        backward_s = timed(lambda: output.sum().backward(), x.device)[0] if output.requires_grad else 0.0
        runs.module.zero_grad(set_to_none=True)
        return _Passes(forward_s, backward_s, output, saved[0])

    return run


def _once(runs: Runs, x: Tensor, batch: Batch) -> Callable[[], object]:
    """Returns a function that runs a block forward and backward."""
    return _passes(runs, x, batch, AutocastCopies(runs.module), wants_grad=True)


@contextmanager
def _warmed_up(
    runs: Runs, x: Tensor, batch: Batch, precision: Precision, wants_grad: bool
) -> Iterator[tuple[Callable[[], _Passes], AutocastCopies]]:
    """Yields :func:`_passes` that find autocast copies, as all but the first micro-batch of a step do, and those."""
    copies = AutocastCopies(runs.module)
    run = _passes(runs, x, batch, copies, wants_grad)
    with precision.cached_autocast(x.device):
        with RefuseOtherRandomness() if runs.draws_by_sample else nullcontext(), copies:
            run()
        yield run, copies


def _kept(runs: Runs, index: int, x: Tensor, batch: Batch, precision: Precision) -> Kept:
    with _warmed_up(runs, x, batch, precision, has_input_grad(x, index)) as (run, _):
        passes = run()
    return Kept(passes.saved_bytes, passes.output.nbytes, _peak(runs, x, batch))


def _measure(runs: Runs, index: int, x: Tensor, batch: Batch, precision: Precision) -> Measured:
    trained, wants_grad = trainable(runs.module), has_input_grad(x, index)
    with _warmed_up(runs, x, batch, precision, wants_grad) as (run, copies):
        full = until_settled(run, lambda passes: passes.seconds)
        checkpointing_s = _checkpointing_seconds(runs, x, batch, wants_grad, full)
    backward_s = lowest_s = typical([passes.backward_s for passes in full])
    input_grad_s = 0.0
    if wants_grad:
        lowest_s = min(_backward_seconds(_passes(runs, x, batch, copies, wants_grad=False)), backward_s)
        for parameter in trained:
            parameter.requires_grad_(False)
        input_grad_s = min(_backward_seconds(run), backward_s)
        for parameter in trained:
            parameter.requires_grad_(True)
    return Measured(
        typical([passes.forward_s for passes in full]),
        input_grad_s,
        backward_s - input_grad_s,
        lowest_s,
        checkpointing_s,
        full[-1].saved_bytes,
        sum(copies.bytes_at.values()),
        full[-1].output.nbytes,
    )


class _Checkpointed:
    """A layer with activation checkpointing, as a stage runs it."""

    def __init__(self, runs: Runs) -> None:
        self.module, self.draws_by_sample, self._runs = runs.module, runs.draws_by_sample, runs

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return checkpoint(self._runs, x, batch, use_reentrant=False, preserve_rng_state=False)


def _checkpointing_seconds(runs: Runs, x: Tensor, batch: Batch, wants_grad: bool, plain: Sequence[_Passes]) -> float:
    """Measures what a pass takes more with activation checkpointing, besides the second forward pass.

    Args:
        plain: Passes without. After long ones it is not worth its time.
    """
    forward_s, plain_s = typical([passes.forward_s for passes in plain]), typical([passes.seconds for passes in plain])
    if plain_s > LONG_PASS_S or not plain[0].output.requires_grad:
        return 0.0
    run = _passes(_Checkpointed(runs), x, batch, AutocastCopies(runs.module), wants_grad)
    seconds = typical([passes.seconds for passes in until_settled(run, lambda passes: passes.seconds)])
    return max(0.0, seconds - plain_s - forward_s)


def _backward_seconds(run: Callable[[], _Passes]) -> float:
    return typical([passes.backward_s for passes in until_settled(run, lambda passes: passes.backward_s)])


def _peak(runs: Runs, x: Tensor, batch: Batch) -> int:
    return peak_forward_bytes(runs.module, lambda: runs(x, batch), (x, *batch.context.values()))


def idle_update_seconds(optimizer: OptimizerSpec, device: torch.device) -> float:
    """Measures the update of one number: the bookkeeping that all layers have together."""
    return _update_seconds([nn.Parameter(torch.zeros(1, device=device))], optimizer)


def _update_seconds(parameters: list[nn.Parameter], spec: OptimizerSpec) -> float:
    """Measures norms, clipping and the optimizer's step; their bookkeeping included, which is one for all layers."""
    optimizer = spec.build(parameters)
    if optimizer is None:
        return 0.0
    own, device, total_norm = {0: parameters}, parameters[0].device, 2 * (spec.clip_norm or 1.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def update() -> None:
        squared_gradient_norms(own, 1, device).tolist()
        unscale_and_clip(own, total_norm, spec.clip_norm, loss_scale=1.0)
        optimizer.step()

    update()  # makes the optimizer's state
    measured = until_settled(lambda: timed(update, device)[0], lambda seconds: seconds)
    for parameter in parameters:
        parameter.grad = None
    return typical(measured)


def _mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()

"""Measures the layers once, before the first plan."""

import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.profiling.memory import AutocastCopies, LiveBytes, count_saved_bytes
from pipetransformer.profiling.timing import timed
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.rng import PerSampleRng, RefuseOtherRandomness

NUM_REPEATS = 5


@dataclass(frozen=True)
class Measured:
    """Measurements of one layer at one batch size, in seconds and bytes."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    activation_bytes: int
    autocast_bytes: int
    output_bytes: int


def profile(
    stack: LayerStack, batches: tuple[Batch, Batch], optimizer: OptimizerSpec, device: torch.device,
    precision: Precision,
) -> Profile:  # fmt: skip
    """Measures every kind of layer once (blocks of one shape are alike) and averages over the ranks. All ranks call it.

    Args:
        stack: The model; layers without storage are loaded one at a time.
        batches: A small and a large batch with inputs; two sizes separate the fixed from the per-sample time.
        optimizer: Builds the optimizer whose update is timed.
        device: The device that computes.
        precision: The types in which the layers compute.
    """
    known: dict[object, LayerProfile] = {}
    kinds = [_kind(stack[index]) for index in range(len(stack))]
    xs = [batch.inputs for batch in batches if batch.inputs is not None]
    for index, kind in enumerate(kinds):
        if kind not in known:
            layer = stack.loaded_copy(index, device).train()
            _fix_weights(layer, stack, index)
            known[kind] = _layer_profile(layer, index, xs, batches, optimizer, precision)
            # the layers above take inputs of this shape; the numbers in them do not matter for the time
            with torch.no_grad():
                layer.eval()
                xs = [precision.run_layer(layer, x, b.context) for x, b in zip(xs, batches, strict=True)]
            del layer  # one at a time: the whole model may be larger than the device
    return Profile(layers=tuple(known[kind] for kind in kinds), optimizer_state_factor=optimizer.state_factor)


def _fix_weights(layer: Layer, stack: LayerStack, index: int) -> None:
    """Fixes the parameters of a copy of a layer that are fixed in the stack."""
    own, trained = stack[index].by_name().values(), set(stack.trainable(index, 0))
    for parameter, original in zip(layer.by_name().values(), own, strict=True):
        parameter.requires_grad_(original in trained)


def _kind(layer: nn.Module) -> object:
    modules = tuple(type(module) for module in layer.modules())
    return modules, tuple(p.shape for p in layer.parameters())


def _trainable(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def _layer_profile(
    layer: nn.Module, index: int, xs: list[Tensor], batches: tuple[Batch, Batch], optimizer: OptimizerSpec,
    precision: Precision,
) -> LayerProfile:  # fmt: skip
    small, large = (_measure(layer, index, x, batch, precision) for x, batch in zip(xs, batches, strict=True))
    sizes = len(batches[0].ids), len(batches[1].ids)  # samples, of which a packed row has several
    names = ("forward_s", "input_grad_s", "weight_grad_s")
    numbers = [getattr(measured, name) for measured in (small, large) for name in names]
    numbers = _mean_over_ranks([*numbers, _optimizer_seconds(layer, optimizer)], next(layer.parameters()).device)
    forward, input_grad, weight_grad = (_affine_time(sizes, numbers[i], numbers[i + 3]) for i in range(3))
    return LayerProfile(
        name=type(layer).__name__,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        optimizer_s=numbers[-1],
        parameter_bytes=sum(p.numel() * p.element_size() for p in layer.parameters()),
        activation_bytes=large.activation_bytes // sizes[1],
        output_bytes=large.output_bytes // sizes[1],
        peak_forward_bytes=_peak_forward_bytes(layer, xs[1], batches[1], precision) // sizes[1],
        autocast_bytes=large.autocast_bytes,
        fixed_bytes=sum(p.nbytes for p in layer.parameters() if not p.requires_grad),
    )


def _measure(layer: nn.Module, index: int, x: Tensor, batch: Batch, precision: Precision) -> Measured:
    wants_grad = x.is_floating_point() and index > 0
    copies, trained = AutocastCopies(layer), _trainable(layer)

    def run(weight_grad: bool) -> tuple[float, float, Tensor, int]:
        for parameter in trained:
            parameter.requires_grad_(weight_grad)
        leaf = x.detach().requires_grad_(wants_grad)
        with PerSampleRng(batch.keys, index), count_saved_bytes(layer, copies) as saved:
            forward_s, output = timed(lambda: precision.run_layer(layer, leaf, batch.context), x.device)
        backward_s = timed(lambda: output.sum().backward(), x.device)[0] if output.requires_grad else 0.0
        layer.zero_grad(set_to_none=True)
        return forward_s, backward_s, output, saved[0]

    with precision.cached_autocast(x.device):  # as all but the first micro-batch of a step find them
        with RefuseOtherRandomness(), copies:
            run(True)  # warm up
        full = [run(True) for _ in range(NUM_REPEATS)]
    inputs_only = [run(False)[1] for _ in range(NUM_REPEATS)] if wants_grad else [0.0]
    for parameter in trained:
        parameter.requires_grad_(True)
    output, activation_bytes = full[-1][2:]
    backward_s, input_grad_s = statistics.median(f[1] for f in full), statistics.median(inputs_only)
    return Measured(
        statistics.median(f[0] for f in full),
        min(input_grad_s, backward_s),
        max(backward_s - input_grad_s, 0.0),
        activation_bytes,
        sum(copies.bytes_at.values()),
        output.numel() * output.element_size(),
    )


def _peak_forward_bytes(layer: nn.Module, x: Tensor, batch: Batch, precision: Precision) -> int:
    """Measures the most bytes that a forward pass allocates at a time when the layer is frozen."""
    layer.eval()
    with torch.no_grad(), LiveBytes() as live:
        for tensor in (*layer.parameters(), *layer.buffers(), x, *batch.context.values()):
            live.add(tensor)
        num_bytes = live.now
        precision.run_layer(layer, x, batch.context)
    layer.train()
    return live.peak - num_bytes


def _optimizer_seconds(layer: nn.Module, spec: OptimizerSpec) -> float:
    for parameter in _trainable(layer):
        parameter.grad = torch.zeros_like(parameter)
    optimizer = spec.build(layer.parameters())
    device = next(layer.parameters()).device
    seconds = [timed(optimizer.step, device)[0] for _ in range(3)] if optimizer else [0.0]
    layer.zero_grad(set_to_none=True)
    return statistics.median(seconds)


def _affine_time(sizes: tuple[int, int], small_s: float, large_s: float) -> AffineTime:
    """Fits a line through two measurements; noise must not make either part negative."""
    per_sample_s = max((large_s - small_s) / (sizes[1] - sizes[0]), 0.0) if sizes[1] > sizes[0] else 0.0
    fixed_s = max(large_s - per_sample_s * sizes[1], 0.0)
    return AffineTime(fixed_s, (large_s - fixed_s) / sizes[1])


def _mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()

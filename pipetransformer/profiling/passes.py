"""Runs one layer forward and backward, as a step does, and measures what that takes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from pipetransformer.profiling.memory import (
    AutocastCopies,
    Kept,
    SavedBytes,
    peak_backward_bytes,
    peak_forward_bytes,
)
from pipetransformer.profiling.timing import timed, typical, until_settled
from pipetransformer.runtime.batch import Batch, SampleLoss, total_loss
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.rng import RefuseOtherRandomness
from pipetransformer.runtime.stage import recomputed

LONG_PASS_S = 0.05  # of a layer, forward and backward; checkpointing itself takes less than a millisecond


@dataclass(frozen=True)
class Measured:
    """Measurements of one layer at one batch size, in seconds and bytes."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    lowest_grad_s: float
    checkpointing_s: float
    loss_s: float
    activation_bytes: int
    autocast_bytes: int
    loss_bytes: int
    output_bytes: int
    peak_backward_bytes: int


BatchLoss = Callable[[Tensor, Batch], Tensor]
"""``loss(output, batch)``: computes the loss of a batch, a scalar."""


class Runs(Protocol):
    """A layer as it runs in a step.

    Attributes:
        module: Has the layer's parameters.
        draws_by_sample: Its random numbers have to come from its samples' streams.
        loss: Computes the loss of a batch from the head's output (B, ...); ``None`` for a layer below.
    """

    module: nn.Module
    draws_by_sample: bool
    loss: BatchLoss | None

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Runs it forward, in training with the numbers that its samples draw."""
        ...


def loss_of_rows(loss: SampleLoss, rows: Callable[[Tensor], Tensor], output: Tensor, batch: Batch) -> Tensor:
    """Computes the loss of a batch with targets, as a step does.

    Args:
        loss: Of each sample.
        rows: Takes from all rows of the batch those of the output.
    """
    targets = batch.loss_targets(1.0)
    assert targets is not None
    return total_loss(loss, output, rows(targets))


def trainable(layer: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that take a gradient."""
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class _Passes:
    """Seconds of a forward and a backward pass, and the bytes of the output and of what forward saved for backward.

    The seconds of the loss are among those of the forward pass. Its bytes are in addition: its output, too, lives until
    backward.
    """

    forward_s: float
    loss_s: float
    backward_s: float
    has_backward: bool
    output_bytes: int
    saved_bytes: int
    loss_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def has_input_grad(x: Tensor, index: int) -> bool:
    """Returns whether a layer's input takes a gradient where all layers train."""
    return x.is_floating_point() and index > 0


def passes(runs: Runs, x: Tensor, batch: Batch, copies: AutocastCopies, wants_grad: bool) -> Callable[[], _Passes]:
    """Returns a function that runs a layer forward, and backward as far as a gradient is asked for.

    Args:
        wants_grad: The input takes a gradient.
    """

    def run() -> _Passes:
        leaf, saved = x.detach().requires_grad_(wants_grad), SavedBytes(runs.module, copies)
        with saved.of_autograd():
            forward_s, output = timed(lambda: runs(leaf, batch), x.device)
            saved_bytes, last, loss_s = saved.total, output, 0.0
            if runs.loss is not None:
                loss_s, last = timed(lambda: _last(runs, output, batch), x.device)
                saved.add(output)
        has_backward = last.requires_grad
        backward_s = timed(lambda: last.sum().backward(), x.device)[0] if has_backward else 0.0
        runs.module.zero_grad(set_to_none=True)
        loss_bytes = saved.total - saved_bytes
        return _Passes(forward_s + loss_s, loss_s, backward_s, has_backward, output.nbytes, saved_bytes, loss_bytes)

    return run


@contextmanager
def _warmed_up(
    runs: Runs, x: Tensor, batch: Batch, precision: Precision, wants_grad: bool
) -> Iterator[tuple[Callable[[], _Passes], AutocastCopies]]:
    """Yields :func:`passes` that find autocast copies, as all but the first micro-batch of a step do, and those."""
    copies = AutocastCopies(runs.module)
    run = passes(runs, x, batch, copies, wants_grad)
    with precision.cached_autocast(x.device):
        with RefuseOtherRandomness() if runs.draws_by_sample else nullcontext(), copies:
            runs(x, batch)
        run()
        yield run, copies


def kept(runs: Runs, index: int, x: Tensor, batch: Batch, precision: Precision) -> Kept:
    """Measures the bytes of a layer's passes over a batch."""
    with _warmed_up(runs, x, batch, precision, has_input_grad(x, index)) as (run, _):
        passes = run()
    return Kept(passes.saved_bytes, passes.loss_bytes, passes.output_bytes, peak(runs, x, batch))


def measure(runs: Runs, index: int, x: Tensor, batch: Batch, precision: Precision) -> Measured:
    """Measures a layer's passes over a batch, with a gradient of its input, of its parameters, and of both."""
    trained, wants_grad = trainable(runs.module), has_input_grad(x, index)
    with _warmed_up(runs, x, batch, precision, wants_grad) as (run, copies):
        full = until_settled(run, lambda passes: passes.seconds)
        checkpointing_s = _checkpointing_seconds(runs, x, batch, wants_grad, full)
        backward_bytes = peak_backward_bytes(
            runs.module, lambda leaf: _last(runs, runs(leaf, batch), batch), x, wants_grad
        )
    backward_s = lowest_s = typical([passes.backward_s for passes in full])
    input_grad_s = 0.0
    if wants_grad:
        lowest_s = min(_backward_seconds(passes(runs, x, batch, copies, wants_grad=False)), backward_s)
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
        typical([passes.loss_s for passes in full]),
        full[-1].saved_bytes,
        sum(copies.bytes_at.values()),
        full[-1].loss_bytes,
        full[-1].output_bytes,
        backward_bytes,
    )


def _last(runs: Runs, output: Tensor, batch: Batch) -> Tensor:
    """Returns what the backward pass of a layer begins with: the loss of the head, or the output."""
    return output if runs.loss is None else runs.loss(output, batch)


class _Checkpointed:
    """A layer with activation checkpointing, as a stage runs it."""

    def __init__(self, runs: Runs) -> None:
        self.module, self.draws_by_sample, self.loss, self._runs = runs.module, runs.draws_by_sample, runs.loss, runs

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return recomputed(self._runs, x, batch)


def _checkpointing_seconds(runs: Runs, x: Tensor, batch: Batch, wants_grad: bool, plain: Sequence[_Passes]) -> float:
    """Measures what a pass takes more with activation checkpointing, besides the second forward pass.

    Args:
        plain: Passes without. After long ones it is not worth its time.
    """
    forward_s = typical([passes.forward_s - passes.loss_s for passes in plain])
    plain_s = typical([passes.seconds for passes in plain])
    if plain_s > LONG_PASS_S or not plain[0].has_backward:
        return 0.0
    run = passes(_Checkpointed(runs), x, batch, AutocastCopies(runs.module), wants_grad)
    seconds = typical([passes.seconds for passes in until_settled(run, lambda passes: passes.seconds)])
    return max(0.0, seconds - plain_s - forward_s)


def _backward_seconds(run: Callable[[], _Passes]) -> float:
    return typical([passes.backward_s for passes in until_settled(run, lambda passes: passes.backward_s)])


def peak(runs: Runs, x: Tensor, batch: Batch) -> int:
    """Returns the most bytes that live in a forward pass without gradient."""
    return peak_forward_bytes(runs.module, lambda: runs(x, batch), batch.context.values()) + x.nbytes

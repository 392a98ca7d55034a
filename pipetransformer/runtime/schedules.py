"""The order of passes on a rank: torch's pipeline schedules by name, and one for a single stage."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.runtime.pipeline_stage import Reduce
from pipetransformer.runtime.tracing import Recorder

Loss = Callable[[Tensor, Tensor], Tensor]
"""``loss(output, target)`` of a micro-batch, a scalar."""

TORCH_SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
}
"""A row for each of :data:`~pipetransformer.autopipe.schedules.SCHEDULES`."""


class SingleStageSchedule:
    """Runs micro-batches one after the other, without the overhead of torch's schedules; called as they are.

    Args:
        module: The only stage. DistributedDataParallel all-reduces its gradients with the last micro-batch.
        num_microbatches: Micro-batches of a step.
        loss: The loss of a micro-batch; ``None`` runs forward only.
        recorder: Records when passes begin and end.
        reduce: Maps the output of a micro-batch to what is kept of it.
    """

    def __init__(
        self, module: nn.Module, num_microbatches: int, loss: Loss | None, recorder: Recorder, reduce: Reduce | None
    ) -> None:
        self._module, self._num_microbatches, self._loss = module, num_microbatches, loss
        self._recorder, self._reduce = recorder, reduce

    def step(
        self, x: Tensor, *, target: Tensor | None = None, losses: list[Tensor] | None = None,
        return_outputs: bool = True, **context: Tensor,
    ) -> Tensor | None:  # fmt: skip
        """Runs forward, and backward where there is a loss.

        Args:
            x: Inputs (B, ...).
            target: Targets (B, ...) for the loss.
            losses: Takes the loss of each micro-batch, before its backward pass.
            return_outputs: Keeps the outputs.
            context: Tensors (B, ...) that the layers need.

        Returns:
            Outputs (B, ...) or what is kept of them, if any.
        """
        outputs: list[Tensor] = []
        last = self._num_microbatches - 1
        for index in range(self._num_microbatches):
            rows = {name: self._rows(tensor, index) for name, tensor in context.items()}
            with self._without_all_reduce() if index < last else nullcontext():
                with self._recorder.span("forward", microbatch=index):
                    output = self._module(self._rows(x, index), **rows)
                if self._loss is not None and target is not None and losses is not None:
                    losses.append(self._loss(output, self._rows(target, index)))
                    with self._recorder.backward(index, self._module, all_reduces=index == last):
                        losses[-1].backward()
            if return_outputs:
                outputs.append(output if self._reduce is None else self._reduce(output))
        return torch.cat(outputs) if outputs else None

    def _without_all_reduce(self) -> AbstractContextManager[None]:
        return self._module.no_sync() if isinstance(self._module, DistributedDataParallel) else nullcontext()

    def _rows(self, tensor: Tensor, index: int) -> Tensor:
        """Returns the rows (B / M, ...) of one micro-batch."""
        size = len(tensor) // self._num_microbatches
        return tensor[index * size : (index + 1) * size]


Schedule = SingleStageSchedule | PipelineScheduleSingle | PipelineScheduleMulti


def pipeline_schedule(name: str, stages: Sequence[PipelineStage], num_microbatches: int, loss: Loss | None) -> Schedule:
    """Creates the schedule of torch for the stages of this rank.

    Args:
        name: A key of :data:`TORCH_SCHEDULES`.
        stages: The stages of this rank, ascending.
        num_microbatches: Micro-batches of a step.
        loss: The loss of a micro-batch; ``None`` runs forward only.
    """
    kind = TORCH_SCHEDULES[name]
    if issubclass(kind, PipelineScheduleMulti):
        return kind([*stages], num_microbatches, loss_fn=loss, scale_grads=False)
    if loss is None:
        kind = ScheduleGPipe  # without backward all schedules of one stage per rank run the same passes
    return kind(stages[0], num_microbatches, loss_fn=loss, scale_grads=False)


def receives_early(name: str, trains: bool) -> bool:
    """Returns whether stages of gloo's ask for messages early, in training or in evaluation.

    In 1F1B both ends of a message come together, and asking early makes nothing shorter. In other orders, and forward
    alone, a stage runs ahead of the one above and sends what nobody waits for yet (``experiments/step_time/receives``).
    """
    return name != "1f1b" or not trains

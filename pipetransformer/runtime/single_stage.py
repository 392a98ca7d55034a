"""The schedule of a pipeline with one stage, which has no neighbours to wait for or to send to."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.runtime.tracing import Recorder

Loss = Callable[[Tensor, Tensor], Tensor]


class SingleStageSchedule:
    """Runs micro-batches one after the other; called as torch's schedules are, whose overhead it does without.

    Args:
        module: The stage. One that averages gradients over replicas does so with the last micro-batch.
        loss: ``loss(output, target)`` of a micro-batch; ``None`` only runs forward.
        recorder: Is told when passes begin and end.
    """

    def __init__(self, module: nn.Module, num_microbatches: int, loss: Loss | None, recorder: Recorder) -> None:
        self._module, self._num_microbatches, self._loss = module, num_microbatches, loss
        self._recorder = recorder

    def step(
        self, x: Tensor, *, target: Tensor | None = None, losses: list[Tensor] | None = None,
        return_outputs: bool = True, **context: Tensor,
    ) -> Tensor | None:  # fmt: skip
        """Forward, and backward where there is a loss, of ``x`` (B, ...) with ``target`` and ``context`` cut alike.

        Returns:
            Outputs (B, ...), if wanted; ``losses`` takes the loss of each micro-batch.
        """
        outputs: list[Tensor] = []
        last = self._num_microbatches - 1
        for index in range(self._num_microbatches):
            part = {name: self._part(tensor, index) for name, tensor in context.items()}
            with self._without_averaging() if index < last else nullcontext():
                with self._recorder.span("forward", microbatch=index):
                    output = self._module(self._part(x, index), **part)
                if self._loss is not None and target is not None and losses is not None:
                    loss = self._loss(output, self._part(target, index))
                    with self._recorder.backward(index, self._module, averages=index == last):
                        loss.backward()
                    losses.append(loss)
            if return_outputs:
                outputs.append(output)
        return torch.cat(outputs) if outputs else None

    def _without_averaging(self) -> AbstractContextManager[None]:
        return self._module.no_sync() if isinstance(self._module, DistributedDataParallel) else nullcontext()

    def _part(self, tensor: Tensor, index: int) -> Tensor:
        """One micro-batch's rows."""
        size = len(tensor) // self._num_microbatches
        return tensor[index * size : (index + 1) * size]

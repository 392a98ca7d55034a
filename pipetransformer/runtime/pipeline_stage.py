"""A rank's stage of a pipeline of torch: it records when its passes run, and asks for messages before it needs them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, Work
from torch.distributed.pipelining import PipelineStage

from pipetransformer.runtime.tracing import Recorder

Reduce = Callable[[Tensor], Tensor]
"""``reduce(output)``: maps (B / M, ...) to rows that are kept."""


class TracedStage(PipelineStage):
    """A stage that records when its passes begin and end, and keeps of the head's output no more than is wanted.

    Torch's schedules wait for the input before they call the pass. Their own marks for a profiler would not do: they
    count that waiting in, and 1F1B sets none.

    Args:
        recorder: Records.
        reduce: Maps the head's output of a micro-batch to what is kept of it; ``None`` in training.
        args, options: Of torch's stage.
    """

    def __init__(self, recorder: Recorder, reduce: Reduce | None, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._recorder, self._reduce = recorder, reduce

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._recorder.span("forward", self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        if self._reduce is None or not self.is_last:
            return output
        reduced = self.output_chunks[-1] = self._reduce(output)
        if hasattr(self, "fwd_cache"):  # torch's name for it has changed
            self.fwd_cache[fwd_chunk_id] = (reduced,), []
        else:
            self._forward_chunk_states[fwd_chunk_id] = self._make_forward_chunk_state((reduced,), [])
        return reduced

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        with self._recorder.span("backward", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **options)


class EarlyReceivingStage(TracedStage):
    """A stage that posts all receives of a step before its first pass, for groups of gloo.

    Gloo sends at once what its receiver has asked for. Anything else is sent by another thread when the receiver asks,
    and that thread waits for a core that the passes have::

        asked early    sender     F0 F1 F2 F3                 asked late    sender     F0 F1 F2 F3 .. send 1 ..
                       receiver      F0 F1 F2 F3                            receiver      F0 ask 1 ........ F1

    Messages between two ranks may be sent in another order than they are asked for, so each has a tag. The schedule is
    given no receives to wait for; a pass waits for its own.

    Args:
        num_microbatches: Micro-batches of a step.
        args, options: Of :class:`TracedStage`.
    """

    def __init__(self, num_microbatches: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_microbatches = num_microbatches
        self._activations: list[list[Work]] = []
        self._gradients: list[list[Work]] = []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        self._ask()
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        return _tagged(super().get_fwd_send_ops(fwd_chunk_id), self._tag(self.stage_index + 1, fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        tag = self._tag(self.stage_index - 1, bwd_chunk_id, is_gradient=True)
        return _tagged(super().get_bwd_send_ops(bwd_chunk_id), tag)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self._ask()  # of the first stage a schedule may not ask what it receives
        _wait(self._activations[fwd_chunk_id])
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        _wait(self._gradients[bwd_chunk_id])
        super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def clear_runtime_states(self) -> None:
        """Begins a step."""
        super().clear_runtime_states()
        self._activations.clear()
        self._gradients.clear()

    def _ask(self) -> None:
        """Posts all receives of the step, once."""
        if self._activations:
            return
        for index in range(self._num_microbatches):
            self._activations.append(_receive(super().get_fwd_recv_ops(index), self._tag(self.stage_index, index)))
        for index in range(self._num_microbatches):
            tag = self._tag(self.stage_index, index, is_gradient=True)
            self._gradients.append(_receive(super().get_bwd_recv_ops(index), tag))

    def _tag(self, receiver: int, microbatch: int, is_gradient: bool = False) -> int:
        """Returns the tag of a message by the stage that receives it; 0 is that of messages without one."""
        return 1 + (2 * receiver + is_gradient) * self._num_microbatches + microbatch


def _receive(operations: Sequence[P2POp], tag: int) -> list[Work]:
    posted = (dist.irecv(each.tensor, each.peer, each.group, tag) for each in operations)
    return [work for work in posted if work is not None]


def _tagged(operations: list[P2POp], tag: int) -> list[P2POp]:
    for each in operations:
        each.tag = tag
    return operations


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()

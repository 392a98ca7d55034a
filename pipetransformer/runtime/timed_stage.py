"""A stage of torch's pipelines whose passes can be timed."""

from typing import Any

from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipetransformer.runtime.tracing import Recorder


class TracedStage(PipelineStage):
    """Tells a recorder when its passes begin and end. Torch's schedules wait for the input before the pass.

    Their own marks for a profiler would not do: they count the wait in, and 1F1B sets none.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **options)
        self._recorder = recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._recorder.span("forward", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        with self._recorder.span("backward", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **options)

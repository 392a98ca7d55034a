"""The layout: how a plan uses the devices, whatever layers its stages have."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

RankOrder = Literal["pipeline-first", "replica-first"]
"""Neighbouring ranks belong to one pipeline, or hold the same layers."""


def microbatch_size(batch_size: int, num_replicas: int, num_microbatches: int) -> int:
    """Returns the samples per micro-batch; the replicas' rows are padded up to it."""
    num_rows = -(-batch_size // num_replicas)
    return -(-num_rows // num_microbatches)


class DeviceLayout(NamedTuple):
    """The grid that a layout makes of the devices.

    Attributes:
        pipeline_size: Devices of a pipeline.
        num_replicas, rank_order: As in the layout.
    """

    pipeline_size: int
    num_replicas: int
    rank_order: RankOrder = "pipeline-first"


@dataclass(frozen=True)
class Layout:
    """Pipelines, their stages and micro-batches; what the search goes through before it partitions the layers.

    With ``stages_per_rank`` above 1 a device runs several stages, which go round the devices of a pipeline::

        4 stages, 2 per rank      device 0: stages 0 and 2      device 1: stages 1 and 3

    Attributes:
        num_stages: Stages of a pipeline, over all its devices.
        num_replicas: Pipelines that work side by side, each on its rows of the global batch.
        num_microbatches: Micro-batches of each replica.
        schedule: A name of :data:`~pipetransformer.autopipe.schedules.SCHEDULES`.
        stages_per_rank: Stages of each device; above 1 only with a schedule for several.
        recompute: Keep only each active layer's input for backward, and recompute the rest of it.
        rank_order: The axis along which neighbouring ranks lie.
        fsdp: Each device keeps a shard of every layer, and has a layer whole only while it runs.
    """

    num_stages: int
    num_replicas: int
    num_microbatches: int
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: bool = False
    rank_order: RankOrder = "pipeline-first"
    fsdp: bool = False

    @property
    def pipeline_size(self) -> int:
        """Devices of a pipeline."""
        return self.num_stages // self.stages_per_rank

    @property
    def num_devices(self) -> int:
        return self.pipeline_size * self.num_replicas

    @property
    def devices(self) -> DeviceLayout:
        return DeviceLayout(self.pipeline_size, self.num_replicas, self.rank_order)

    def microbatch_size(self, batch_size: int) -> int:
        """Returns the samples per micro-batch at a global batch size."""
        return microbatch_size(batch_size, self.num_replicas, self.num_microbatches)

    def device_stages(self, device: int) -> range:
        """Returns the stages of a pipeline's device, ascending."""
        return range(device, self.num_stages, self.pipeline_size)

"""The plan, the one value that crosses from deciding to doing, and its layout, the part that has no layers.

Layers are numbered over the whole model: 0 is the embedding, ``1 .. L`` are the blocks, ``L + 1`` is the head.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipetransformer.autopipe.schedules import SCHEDULES
from pipetransformer.mesh import SINGLE, StageMesh

RankOrder = Literal["pipeline-first", "replica-first"]
"""Neighbouring ranks belong to one pipeline, or hold the same layers."""
Stages = tuple[tuple[int, int], ...]
"""The layers ``(first, last)`` of each stage, both included, from the lowest stage up."""


def microbatch_size(batch_size: int, num_shares: int, num_microbatches: int, multiple: int = 1) -> int:
    """Returns the samples per micro-batch; the rows of each share of the batch are padded up to it.

    Args:
        num_shares: Parts of the batch: of the replicas, and of the ranks of a mesh that splits rows.
        multiple: Of the samples, where a mesh splits a micro-batch further.
    """
    num_rows = -(-batch_size // num_shares)
    return -(-num_rows // (num_microbatches * multiple)) * multiple


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
        mesh: Ranks that run each stage together.
        chunk_bytes: Weights and gradients lie in host memory, and so many bytes of them on a device at a time; 0: they
            lie on the device.
    """

    num_stages: int
    num_replicas: int
    num_microbatches: int
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: bool = False
    rank_order: RankOrder = "pipeline-first"
    fsdp: bool = False
    mesh: StageMesh = SINGLE
    chunk_bytes: int = 0

    @property
    def pipeline_size(self) -> int:
        """Devices of a pipeline."""
        return self.num_stages // self.stages_per_rank

    @property
    def num_devices(self) -> int:
        return self.pipeline_size * self.num_replicas * self.mesh.num_ranks

    @property
    def num_shares(self) -> int:
        """Parts of the global batch that ranks read: of each replica, and of each of a mesh that splits rows."""
        return self.num_replicas * self.mesh.dp_shard

    @property
    def devices(self) -> DeviceLayout:
        return DeviceLayout(self.pipeline_size, self.num_replicas, self.rank_order)

    def microbatch_size(self, batch_size: int) -> int:
        """Returns the samples per micro-batch at a global batch size."""
        return microbatch_size(batch_size, self.num_shares, self.num_microbatches, self.mesh.rows_multiple)

    def device_stages(self, device: int) -> range:
        """Returns the stages of a pipeline's device, ascending."""
        return range(device, self.num_stages, self.pipeline_size)


def layer_above(num_blocks: int) -> int:
    """Returns the first layer above the lowest blocks, frozen or cached; the embedding goes with the first block."""
    return num_blocks + 1 if num_blocks else 0


@dataclass(frozen=True)
class Partition:
    """The layers that run, cut into stages.

    Attributes:
        num_frozen: Blocks that take no gradient, from the bottom; the embedding freezes with the first of them.
        cache_level: Blocks whose output is read from the cache instead of computed; 0 means that nothing is cached.
        stages: The layers ``(first, last)`` of each stage, both included, contiguous up to the head.
    """

    num_frozen: int
    cache_level: int
    stages: Stages

    @property
    def first_layer(self) -> int:
        """The first layer that runs; everything below it is read from the cache."""
        return self.stages[0][0]

    @property
    def num_layers(self) -> int:
        return self.stages[-1][1] + 1

    @property
    def first_active_layer(self) -> int:
        """The first layer that takes a gradient."""
        return layer_above(self.num_frozen)

    def stage_layers(self, stage: int) -> range:
        first, last = self.stages[stage]
        return range(first, last + 1)


@dataclass(frozen=True)
class Plan(Layout, Partition):  # the fields of the last base come first
    """An arrangement of the model on the devices, valid until the next transition.

    Attributes:
        num_stages: As many as ``stages`` has.
        predicted_step_s: The time of one optimizer step by the cost model, in seconds.
    """

    num_stages: int = field(init=False)
    predicted_step_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_stages", len(self.stages))
        assert 0 <= self.cache_level <= self.num_frozen, self
        assert len(self.stages) >= 1, self
        assert min(self.num_replicas, self.num_microbatches, self.stages_per_rank) >= 1, self
        assert self.schedule in SCHEDULES, self
        assert len(self.stages) % self.stages_per_rank == 0, self
        assert self.stages_per_rank == 1 or SCHEDULES[self.schedule].multi_stage, self
        assert not self.fsdp or (len(self.stages) == 1 and self.mesh == SINGLE), self
        assert not self.chunk_bytes or (self.recompute and self.mesh == SINGLE and not self.fsdp), self
        assert not self.chunk_bytes or self.stages_per_rank == 1, self
        assert self.stages[0][0] == layer_above(self.cache_level), self
        assert all(first <= last for first, last in self.stages), self
        assert all(a[1] + 1 == b[0] for a, b in zip(self.stages, self.stages[1:], strict=False)), self

    @classmethod
    def laid_out(cls, layout: Layout, num_frozen: int, cache_level: int, stages: Stages) -> "Plan":
        """Returns the plan that gives a layout its stages."""
        return cls(num_frozen, cache_level, stages, **{k: v for k, v in vars(layout).items() if k != "num_stages"})

    def device_layers(self, device: int) -> list[int]:
        """Returns the layers of a pipeline's device, ascending."""
        return [layer for stage in self.device_stages(device) for layer in self.stage_layers(stage)]

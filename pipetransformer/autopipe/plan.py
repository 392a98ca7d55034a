"""The plan: the one value that crosses from deciding to doing.

Layers are numbered over the whole model: 0 is the embedding, ``1 .. L`` are the blocks, ``L + 1`` is the head.
"""

from dataclasses import dataclass

Stages = tuple[tuple[int, int], ...]
"""The layers ``(first, last)`` of each stage, both included, from the lowest stage up."""

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b")
SKIPS_GRADIENTS = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
"""Schedules of torch that give wrong or no gradients over a frozen stage, without an error."""


def layer_above(num_blocks: int) -> int:
    """The first layer above so many blocks from the bottom, frozen or cached; the embedding goes with the first one."""
    return num_blocks + 1 if num_blocks else 0


@dataclass(frozen=True)
class Plan:
    """An arrangement of the model on the devices, valid until the next transition.

    With ``stages_per_rank`` above 1 a device runs several stages, which go round the devices of a pipeline::

        4 stages, 2 chunks      device 0: stages 0 and 2      device 1: stages 1 and 3

    Attributes:
        num_frozen: Blocks that take no gradient, from the bottom; the embedding freezes with the first of them.
        cache_level: Blocks whose output is read from the cache instead of computed; 0 means that nothing is cached.
        stages: The layers ``(first, last)`` of each stage, both included, contiguous up to the head.
        num_replicas: Pipelines that work side by side on shares of the global batch.
        num_microbatches: Micro-batches that each replica's share is cut into.
        schedule: One of :data:`SCHEDULES`.
        stages_per_rank: Stages of each device; above 1 only with ``interleaved1f1b``.
        recompute: Keep only each active layer's input for backward, and compute the rest of it again.
        replicas_adjacent: Neighbouring ranks hold the same layers instead of neighbouring ones.
        sharded: Each of all devices keeps a share of every layer, and has a layer whole only while it runs.
        predicted_step_s: What the cost model expects one optimizer step to take, in seconds.
    """

    num_frozen: int
    cache_level: int
    stages: Stages
    num_replicas: int
    num_microbatches: int
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: bool = False
    replicas_adjacent: bool = False
    sharded: bool = False
    predicted_step_s: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.cache_level <= self.num_frozen, self
        assert len(self.stages) >= 1, self
        assert min(self.num_replicas, self.num_microbatches, self.stages_per_rank) >= 1, self
        assert self.schedule in SCHEDULES, self
        assert len(self.stages) % self.stages_per_rank == 0, self
        assert self.stages_per_rank == 1 or self.schedule == "interleaved1f1b", self
        assert not self.sharded or len(self.stages) == 1, self
        assert self.stages[0][0] == layer_above(self.cache_level), self
        assert all(first <= last for first, last in self.stages), self
        assert all(a[1] + 1 == b[0] for a, b in zip(self.stages, self.stages[1:], strict=False)), self

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def pipeline_size(self) -> int:
        """Devices of a pipeline."""
        return self.num_stages // self.stages_per_rank

    @property
    def num_devices(self) -> int:
        return self.pipeline_size * self.num_replicas

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

    def device_stages(self, device: int) -> range:
        """The stages of a pipeline's device, ascending."""
        return range(device, self.num_stages, self.pipeline_size)

    def device_layers(self, device: int) -> list[int]:
        """The layers of a pipeline's device, ascending."""
        return [layer for stage in self.device_stages(device) for layer in self.stage_layers(stage)]

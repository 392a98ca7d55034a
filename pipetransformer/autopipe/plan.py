"""The plan: the one value that crosses from deciding to doing.

Layers are numbered over the whole model: 0 is the embedding, ``1 .. L`` are the blocks, ``L + 1`` is the head.
"""

from dataclasses import dataclass, field

from pipetransformer.autopipe.layout import Layout
from pipetransformer.autopipe.schedules import SCHEDULES

Stages = tuple[tuple[int, int], ...]
"""The layers ``(first, last)`` of each stage, both included, from the lowest stage up."""


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
        assert not self.fsdp or len(self.stages) == 1, self
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

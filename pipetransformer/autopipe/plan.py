"""The plan: the one value that crosses from deciding to doing.

Layers are numbered over the whole model: 0 is the embedding, ``1 .. L`` are the blocks, ``L + 1`` is the head.
"""

from dataclasses import dataclass

SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Plan:
    """An arrangement of the model on the devices, valid until the next transition.

    Attributes:
        num_frozen: Blocks that take no gradient, from the bottom; the embedding freezes with the first of them.
        cache_level: Blocks whose output is read from the cache instead of computed; 0 means that nothing is cached.
        stages: The layers ``(first, last)`` of each stage, both included, contiguous up to the head.
        num_replicas: Pipelines that work side by side on shares of the global batch.
        num_microbatches: Micro-batches that each replica's share is cut into.
        schedule: One of :data:`SCHEDULES`.
        predicted_step_s: What the cost model expects one optimizer step to take, in seconds.
    """

    num_frozen: int
    cache_level: int
    stages: tuple[tuple[int, int], ...]
    num_replicas: int
    num_microbatches: int
    schedule: str = "1f1b"
    predicted_step_s: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.cache_level <= self.num_frozen, self
        assert len(self.stages) >= 1, self
        assert min(self.num_replicas, self.num_microbatches) >= 1, self
        assert self.schedule in SCHEDULES, self
        assert self.stages[0][0] == (self.cache_level + 1 if self.cache_level else 0), self
        assert all(first <= last for first, last in self.stages), self
        assert all(a[1] + 1 == b[0] for a, b in zip(self.stages, self.stages[1:], strict=False)), self

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.num_replicas

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
        return self.num_frozen + 1 if self.num_frozen else 0

    def stage_layers(self, stage: int) -> range:
        first, last = self.stages[stage]
        return range(first, last + 1)

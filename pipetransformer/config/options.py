"""What a user may write besides the specs of the groups, as plain values."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

PRECISIONS = ("float32", "float64", "bfloat16", "float16")
STORAGE = ("exact", "float32", "bfloat16", "float16", "int8")
AUGMENTATIONS = ("off", "first_draw", "variants")
ARRANGEMENTS = ("elastic", "data", "sharded", "pipeline", "single")


@dataclass(frozen=True)
class Parallel:
    """Devices, and what is fixed of the plan. ``None`` leaves the choice to the planner.

    Attributes:
        arrangement: One of :data:`ARRANGEMENTS`. ``elastic`` is planned and changes; ``data`` has the whole model on
            every device, ``sharded`` a share of each layer on every device (FSDP2), ``pipeline`` one pipeline over all
            devices, ``single`` one device, from start to end.
        world_size: Processes, one per device; ``None``: one per GPU, or two without a GPU.
        device_memory_gib: What weights, gradients, optimizer state and activations may take on one device.
        num_stages, num_replicas, num_microbatches, schedule: Fixed for the whole run when given.
        stages_per_rank: Stages of each device, likewise.
        recompute: Keep only the inputs of layers for backward and compute the rest again, likewise.
        autopipe: Re-partition the active layers when blocks freeze.
        autodp: Turn freed devices into replicas.
        device: ``auto``, ``cpu`` or ``cuda``.
        timeout_s: Longest wait for another process before the run stops with an error.
    """

    arrangement: str = "elastic"
    world_size: int | None = None
    device_memory_gib: float | None = None
    num_stages: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = 1
    recompute: bool | None = None
    autopipe: bool = True
    autodp: bool = True
    device: str = "auto"
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Cache:
    """Where frozen features go.

    Attributes:
        path: Folder of stores that outlive the run, for runs with the same frozen layers to find; ``None`` keeps
            them, on the disk of the run folder, for as long as the run lasts.
        memory_gib: Shared memory of a node, at most.
        disk_gib: Disk of a node, at most.
        storage: One of :data:`STORAGE`.
        augmentation: One of :data:`AUGMENTATIONS`: what to do with a transform that is random.
        variants: Random draws of each sample, with ``augmentation=variants``.
    """

    enabled: bool = True
    path: str | None = None
    memory_gib: float = 2.0
    disk_gib: float = 20.0
    storage: str = "exact"
    augmentation: str = "off"
    variants: int = 1

    @property
    def num_draws(self) -> int:
        """Random draws of each sample that are kept; 0 where a random transform keeps the cache off."""
        return {"off": 0, "first_draw": 1, "variants": self.variants}[self.augmentation]


@dataclass(frozen=True)
class Config:
    """One run, as plain values: the specs of the groups and the general options.

    Attributes:
        batch_size: Samples of one optimizer step over all replicas, whatever the topology.
        precision: One of :data:`PRECISIONS`. The last two are of matrix products, under autocast; weights, optimizer
            state, the cache and what goes between stages stay float32. float16 scales the loss.
        eval_every_epochs: Epochs between two evaluations; the end of the run is always evaluated.
        log_every_steps: Steps between two step lines in the log where there is no terminal.
        trace: Write what every rank does in one step of each plan; that step is slower.
    """

    model: Any = MISSING
    dataset: Any = MISSING
    freeze: Any = MISSING
    optim: Any = MISSING
    logger: Any = MISSING
    parallel: Parallel = field(default_factory=Parallel)
    cache: Cache = field(default_factory=Cache)
    seed: int = 1
    epochs: int = 3
    batch_size: int = 32
    precision: str = "float32"
    eval_every_epochs: int = 1
    log_every_steps: int = 20
    trace: bool = False


@dataclass(frozen=True)
class Arrangement:
    """A static pipeline, one stage on a device, to compare with; ``None`` leaves the choice to the planner."""

    num_stages: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None


@dataclass(frozen=True)
class SimulationConfig(Config):
    """A run that is only simulated: what it would be started with, and what stands for devices, model and data.

    Attributes:
        cluster: The devices, a :class:`~pipetransformer.simulate.hardware.Hardware`.
        shape: The model's size, a :class:`~pipetransformer.simulate.analytic.TransformerShape`.
        pipeline: The static pipeline that the run is compared with.
        num_samples: Training samples of an epoch.
    """

    cluster: Any = MISSING
    shape: Any = MISSING
    pipeline: Arrangement = field(default_factory=Arrangement)
    num_samples: int = MISSING

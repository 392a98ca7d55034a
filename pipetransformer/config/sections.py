"""The sections of a run's configuration whose options are plain values, a dataclass each."""

from dataclasses import dataclass, field
from typing import cast, get_args

from pipetransformer.mesh import Algorithm, ReduceDtype, StageMesh

STORAGE = ("exact", "float32", "bfloat16", "float16", "int8")
AUGMENTATIONS = ("off", "first_draw", "variants", "flip_pair")
STEP_ACTIONS = ("stop", "skip", "roll_back")
FREEZE_ACTIONS = ("stop", "unfreeze", "roll_back")
SAVED = ("last", "best")
CPU_PROCESSES = 2
TP_ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
ARRANGEMENTS = ("elastic", "data", "sharded", "pipeline", "single")


@dataclass(frozen=True)
class Parallel:
    """Devices, and constraints on the plan. ``None`` leaves the choice to the planner.

    Attributes:
        arrangement: One of :data:`ARRANGEMENTS`. ``elastic`` is planned and changes; ``data`` has the whole model on
            every device, ``sharded`` a shard of each layer on every device (FSDP2), ``pipeline`` one pipeline over all
            devices, ``single`` one device, from start to end.
        world_size: Processes, one per device; ``None``: one per GPU, or without a GPU two, or as many as a mesh takes.
        device_memory_gib: Budget of one device for weights, gradients, optimizer state and activations.
        num_stages, num_replicas, num_microbatches, schedule: Fixed for the whole run when given.
        stages_per_rank: Stages of each device, likewise.
        recompute: Activation checkpointing: keep only the inputs of layers and recompute the rest, likewise.
        tp: Parts of heads and widths of each stage, likewise (tensor parallelism).
        cp: Parts of the tokens of a sample, likewise; attention goes around a ring.
        dp_shard: Parts of the rows of a batch whose ranks also have the weights in parts, likewise.
        tp_algorithm: One of :data:`TP_ALGORITHMS`: how ``tp`` splits matrices.
        reduce_dtype: One of :data:`~pipetransformer.mesh.REDUCE_DTYPES`: in which the ranks of a mesh sum 16 bits.
        device_chunk_gib: GiB of weights and gradients that are kept on a device. The rest stays in host memory, and is
            copied a layer at a time; moments stay there, too. ``None`` keeps everything on the device.
        offload_path: Folder of files that take the place of host memory.
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
    tp: int | None = 1
    cp: int | None = 1
    dp_shard: int | None = 1
    tp_algorithm: str = "1d"
    reduce_dtype: str = "float32"
    device_chunk_gib: float | None = None
    offload_path: str | None = None
    autopipe: bool = True
    autodp: bool = True
    device: str = "auto"
    timeout_s: float = 600.0

    @property
    def mesh_sizes(self) -> dict[str, int | None]:
        """The sizes of a mesh by name; ``None`` leaves one to the planner."""
        return {"tp": self.tp, "cp": self.cp, "dp_shard": self.dp_shard}

    @property
    def splits_stages(self) -> bool:
        """True where several ranks may run a stage together."""
        return any(size != 1 for size in self.mesh_sizes.values())

    @property
    def mesh(self) -> StageMesh:
        """The smallest mesh that the options allow."""
        sizes = {name: size or 1 for name, size in self.mesh_sizes.items()}
        algorithm, reduce_dtype = cast("Algorithm", self.tp_algorithm), cast("ReduceDtype", self.reduce_dtype)
        return StageMesh(**sizes, algorithm=algorithm, reduce_dtype=reduce_dtype)

    @property
    def cpu_processes(self) -> int:
        """Processes without a GPU where the user gives no number."""
        return max(CPU_PROCESSES, self.mesh.num_ranks * (self.num_replicas or 1) if self.splits_stages else 1)


@dataclass(frozen=True)
class Cache:
    """Where frozen features go.

    Attributes:
        path: Folder of stores that outlive the run, for later runs with the same frozen layers; ``None`` keeps them
            on the disk of the run folder and deletes them at its end.
        memory_gib: Largest shared memory of a node.
        disk_gib: Largest disk space of a node.
        storage: One of :data:`STORAGE`.
        require: Train only where the output of frozen layers is read from the cache: the run ends with an error where
            the cache is off, has too little room, or is not in ``path``. The fill itself is allowed.
        wait_s: Longest wait for a store that another run fills with the features of this one.
        augmentation: One of :data:`AUGMENTATIONS`: the treatment of a random transform.
        variants: Random draws of each sample, with ``augmentation=variants``.
    """

    enabled: bool = True
    path: str | None = None
    require: bool = False
    wait_s: float = 3600.0
    memory_gib: float = 2.0
    disk_gib: float = 20.0
    storage: str = "exact"
    augmentation: str = "off"
    variants: int = 1

    @property
    def num_draws(self) -> int:
        """Cached draws of each sample under a random transform; 0 if such a transform turns the cache off."""
        return {"off": 0, "first_draw": 1, "variants": self.variants, "flip_pair": 2}[self.augmentation]


@dataclass(frozen=True)
class Loading:
    """Reading ahead of samples that the cache does not hold, by the names of torch's ``DataLoader``.

    Attributes:
        num_workers: Processes of each rank that decode and transform the samples of coming steps; 0: the rank does it
            when the step begins; ``None``: for pictures that are decoded or transformed as many as the cores leave,
            else 0.
        prefetch_factor: Batches that each of them has ready at most.
    """

    num_workers: int | None = None
    prefetch_factor: int = 2


@dataclass(frozen=True)
class Checkpointing:
    """When the run is saved so that it can be resumed, and how many checkpoints stay in ``<run folder>/checkpoints``.

    Attributes:
        enabled: Save at all.
        every_steps: Save after every so many steps, whatever it costs; ``None``: by time and epoch alone.
        every_minutes: Save when so many minutes have passed, and at the end of each epoch; ``None``: by epoch alone.
        keep: Newest checkpoints that stay.
        keep_best: Those with the best main metric that stay in addition.
    """

    enabled: bool = True
    every_steps: int | None = None
    every_minutes: float | None = 15.0
    keep: int = 2
    keep_best: int = 1


@dataclass(frozen=True)
class Evaluation:
    """When a run is evaluated, by which metric it is judged, and what follows.

    Attributes:
        every_epochs: Epochs between two evaluations; ``None``: by steps alone. The end of the run is always evaluated.
        every_steps: Evaluate after every so many steps, in addition; ``None``: by epochs alone.
        metric: The main metric: ``name`` of the first split, or ``split/name``; ``None``: the first one of that split.
            Of a loss, an error or a perplexity less is better, as a word of its name tells, of all others more.
        patience: Evaluations without a new best after which the run ends; ``None``: it never ends early.
        min_delta: A new best is better than the last one by more than this.
        save: One of :data:`SAVED`: the weights that end in ``model/``.
    """

    every_epochs: int | None = 1
    every_steps: int | None = None
    metric: str | None = None
    patience: int | None = None
    min_delta: float = 0.0
    save: str = "last"


@dataclass(frozen=True)
class Profiling:
    """The measuring of layers and links at the start.

    Attributes:
        path: Folder in which the measurements are kept, so that of several equal jobs the first one measures; ``None``:
            every run measures.
    """

    path: str | None = None


@dataclass(frozen=True)
class Resume:
    """The run to go on with.

    Attributes:
        run: Its folder; ``auto`` goes on with the run in this run folder, or starts it; ``None`` starts a run.
        allow: Options that change the result and may differ from those of the run, such as ``optim.lr``.
    """

    run: str | None = None
    allow: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Launch:
    """Restarts of the ranks after one of them has died.

    Attributes:
        max_restarts: Times that all ranks are started again, to go on from the last checkpoint; ``None``: 3 where
            checkpoints are written, else 0.
        shrink: Start again with as many ranks fewer as were killed.
    """

    max_restarts: int | None = None
    shrink: bool = False


@dataclass(frozen=True)
class Guard:
    """Answers to numbers that go wrong.

    Attributes:
        not_finite: One of :data:`STEP_ACTIONS`, for a loss or a gradient that is not finite.
        exploding: The same for a gradient whose norm is above ``max_norm_ratio`` times the mean of the last steps.
        max_norm_ratio: See ``exploding``; ``None``: no norm is too large.
        freeze: One of :data:`FREEZE_ACTIONS`, for a main metric that falls by more than ``freeze.guard``.
        max_skips: Steps in a row whose update is skipped; one more ends the run.
        max_rollbacks: Times that the run is rolled back or unfrozen. A bad step after that ends the run; after a freeze
            that hurts the frozen blocks stay, and no more freeze.
    """

    not_finite: str = "stop"
    exploding: str = "skip"
    max_norm_ratio: float | None = None
    freeze: str = "roll_back"
    max_skips: int = 3
    max_rollbacks: int = 3


@dataclass(frozen=True)
class Targets:
    """Classes beside those of this package that a ``_target_`` may name.

    Attributes:
        allow: Full names of classes, or of modules all of whose classes may be named.
    """

    allow: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StaticPipeline:
    """A static pipeline to compare with, one stage per device; ``None`` leaves the choice to the planner."""

    num_stages: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None

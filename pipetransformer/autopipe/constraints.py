"""Constraints that the user puts on the plan, and the refusal of those that cannot be met."""

from dataclasses import dataclass

from pipetransformer.autopipe.meshes import mesh_batch_size
from pipetransformer.autopipe.plan import Stages
from pipetransformer.autopipe.schedules import SCHEDULES
from pipetransformer.errors import InfeasiblePlan, UserError
from pipetransformer.mesh import SINGLE, StageMesh


@dataclass(frozen=True)
class PlanConstraints:
    """Fields of the layout that are fixed; ``None`` leaves one to the search.

    Attributes:
        num_stages: Stages of a pipeline, over all its devices.
        num_replicas: Pipelines side by side.
        num_microbatches: Micro-batches of each replica.
        schedule: One of :data:`~pipetransformer.autopipe.schedules.SCHEDULES`.
        stages: The exact layers ``(first, last)`` of each stage.
        recompute: Activation checkpointing.
        stages_per_rank: Stages of each device.
        meshes: Those that the ranks of a stage may form, the simplest first.

    Raises:
        UserError: The schedule is unknown or runs one stage per rank, or a number is below 1.
    """

    num_stages: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    stages: Stages | None = None
    recompute: bool | None = None
    stages_per_rank: int | None = None
    meshes: tuple[StageMesh, ...] = (SINGLE,)

    def __post_init__(self) -> None:
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise UserError(f"`schedule`={self.schedule} does not exist; choose one of {', '.join(SCHEDULES)}")
        for name in ("num_stages", "num_replicas", "num_microbatches", "stages_per_rank"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UserError(f"`{name}`={number} must be at least 1, or null to let the planner choose")
        if (self.stages_per_rank or 1) > 1 and self.schedule and not SCHEDULES[self.schedule].multi_stage:
            raise UserError(
                f"`schedule`={self.schedule} runs one stage on each device; drop `stages_per_rank`="
                f"{self.stages_per_rank} or take `schedule`=interleaved1f1b"
            )

    @property
    def fixed_num_stages(self) -> int | None:
        return len(self.stages) if self.stages else self.num_stages

    @property
    def most_stages_per_rank(self) -> int:
        return self.stages_per_rank or 4


UNCONSTRAINED = PlanConstraints()


def check_world(
    num_devices: int, num_layers: int, batch_size: int, meshes: tuple[StageMesh, ...] = (SINGLE,)
) -> None:  # fmt: skip
    """Refuses more devices than one layer and one sample each could fill, or a mesh of devices each.

    Raises:
        InfeasiblePlan: With the numbers and the options to change.
    """
    most = max(num_layers * mesh_batch_size(batch_size, mesh) * mesh.num_ranks for mesh in meshes)
    if num_devices > most:
        raise InfeasiblePlan(
            f"`num_devices`={num_devices} is more than {num_layers} layers x `batch_size`={batch_size} can fill "
            f"({most} devices); lower `num_devices` or raise `batch_size`"
        )


def check_constraints(constraints: PlanConstraints, layers: range, num_devices: int, batch_size: int) -> None:
    """Refuses constraints that leave no layout for the layers that run.

    Raises:
        InfeasiblePlan: With the numbers and the options to change.
    """
    if constraints.stages:
        _check_stages(constraints, constraints.stages, layers)
    _check_stages_per_rank(constraints, len(layers))
    _check_devices(constraints, len(layers), num_devices)
    _check_batch(constraints, batch_size)


def _check_stages(constraints: PlanConstraints, stages: Stages, layers: range) -> None:
    if [layer for first, last in stages for layer in range(first, last + 1)] != list(layers):
        raise InfeasiblePlan(
            f"the fixed stages {stages} do not cover layers {layers[0]} to {layers[-1]} once and in order; they must "
            "start at the first layer that is not cached and end at the head"
        )
    if constraints.num_stages not in (None, len(stages)):
        raise InfeasiblePlan(f"`num_stages`={constraints.num_stages} contradicts the fixed stages {stages}; drop one")


def _check_stages_per_rank(constraints: PlanConstraints, num_layers: int) -> None:
    stages_per_rank, num_stages = constraints.stages_per_rank or 1, constraints.fixed_num_stages
    if stages_per_rank == 1:
        return
    if num_stages is not None and (num_stages % stages_per_rank or num_stages == stages_per_rank):
        raise InfeasiblePlan(
            f"`num_stages`={num_stages} cannot be {stages_per_rank} stages (`stages_per_rank`) on each "
            f"of two or more devices; take `num_stages`={2 * stages_per_rank} or a larger multiple of "
            f"{stages_per_rank}"
        )
    if num_stages is None and num_layers < 2 * stages_per_rank:
        raise InfeasiblePlan(
            f"`stages_per_rank`={stages_per_rank} needs {2 * stages_per_rank} layers for two devices, and "
            f"{num_layers} run; lower `stages_per_rank`"
        )


def _check_devices(constraints: PlanConstraints, num_layers: int, num_devices: int) -> None:
    num_stages, stages_per_rank, num_replicas = (
        constraints.fixed_num_stages,
        constraints.stages_per_rank or 1,
        constraints.num_replicas or 1,
    )
    if (num_stages or 1) > num_layers:
        raise InfeasiblePlan(
            f"`num_stages`={num_stages} is more than the {num_layers} layers that run; lower `num_stages`"
        )
    pipeline_size = _smallest_pipeline(constraints)
    if pipeline_size * num_replicas > num_devices:
        per_rank = "" if stages_per_rank == 1 else f" / `stages_per_rank`={stages_per_rank}"
        raise InfeasiblePlan(
            f"`num_stages`={num_stages or pipeline_size * stages_per_rank}{per_rank} x `num_replicas`="
            f"{num_replicas} need {pipeline_size * num_replicas} devices, and there are {num_devices}; lower one of "
            "them or raise `num_devices`"
        )


def _smallest_pipeline(constraints: PlanConstraints) -> int:
    """Returns the fewest devices that the fixed stages can be on."""
    num_stages = constraints.fixed_num_stages
    if num_stages is None:
        return 2 if (constraints.stages_per_rank or 1) > 1 else 1
    return num_stages // max(stages_per_rank_choices(constraints, num_stages))


def stages_per_rank_choices(constraints: PlanConstraints, num_stages: int) -> list[int]:
    """Returns the numbers of stages that each device may run: one, or up to four on two or more devices.

    More take more memory and transfers than they save waiting. Stages that the user gives are one for each device.
    """
    only_one = constraints.stages or (constraints.schedule and not SCHEDULES[constraints.schedule].multi_stage)
    if constraints.stages_per_rank is not None:
        counts: tuple[int, ...] = (constraints.stages_per_rank,)
    else:
        counts = (1,) if only_one else tuple(range(1, constraints.most_stages_per_rank + 1))
    return [count for count in counts if num_stages % count == 0 and (count == 1 or num_stages > count)]


def _check_batch(constraints: PlanConstraints, batch_size: int) -> None:
    num_replicas, num_microbatches = constraints.num_replicas or 1, constraints.num_microbatches or 1
    num_samples = -(-batch_size // num_replicas)
    if num_replicas > batch_size or num_microbatches > num_samples:
        raise InfeasiblePlan(
            f"`num_replicas`={num_replicas} x `num_microbatches`={num_microbatches} is more than "
            f"`batch_size`={batch_size} has samples for; lower one of them or raise `batch_size`"
        )
    pipeline_size, most_microbatches = _smallest_pipeline(constraints), constraints.num_microbatches or num_samples
    if constraints.schedule and most_microbatches < SCHEDULES[constraints.schedule].min_microbatches(pipeline_size):
        raise InfeasiblePlan(
            f"`schedule`={constraints.schedule} needs a micro-batch for each of `num_stages`="
            f"{pipeline_size} stages, and "
            f"`num_microbatches` is at most {most_microbatches} (`num_replicas`={num_replicas}, "
            f"`batch_size`={batch_size}); change one of them or take `schedule`=gpipe"
        )

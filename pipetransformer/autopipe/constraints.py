"""What the user fixes of a plan, and what to say where that cannot be."""

from dataclasses import dataclass

from pipetransformer.autopipe.plan import SCHEDULES, Stages
from pipetransformer.errors import InfeasiblePlan, UserError


@dataclass(frozen=True)
class PlanConstraints:
    """What is fixed instead of searched; ``None`` leaves it to the search.

    Attributes:
        num_stages: Stages of a pipeline, over all its devices.
        num_replicas: Pipelines side by side.
        num_microbatches: Micro-batches of each replica's share.
        schedule: One of :data:`~pipetransformer.autopipe.plan.SCHEDULES`.
        stages: The exact layers ``(first, last)`` of each stage.
        recompute: Activation checkpointing.
        stages_per_rank: Stages of each device.

    Raises:
        UserError: The schedule is unknown or cannot hold the chunks, or a number is below 1.
    """

    num_stages: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    stages: Stages | None = None
    recompute: bool | None = None
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise UserError(f"`schedule`={self.schedule} does not exist; choose one of {', '.join(SCHEDULES)}")
        for name in ("num_stages", "num_replicas", "num_microbatches", "stages_per_rank"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UserError(f"`{name}`={number} must be at least 1, or null to let the planner choose")
        if (self.stages_per_rank or 1) > 1 and self.schedule not in (None, "interleaved1f1b"):
            raise UserError(
                f"`schedule`={self.schedule} runs one stage on each device; drop `stages_per_rank`="
                f"{self.stages_per_rank} or take `schedule`=interleaved1f1b"
            )

    @property
    def fixed_num_stages(self) -> int | None:
        return len(self.stages) if self.stages else self.num_stages


UNCONSTRAINED = PlanConstraints()


def check_world(num_devices: int, num_layers: int, batch_size: int) -> None:
    """Refuses more devices than one layer and one sample each could fill.

    Raises:
        InfeasiblePlan: With the numbers and the options to change.
    """
    if num_devices > num_layers * batch_size:
        raise InfeasiblePlan(
            f"`num_devices`={num_devices} is more than {num_layers} layers x `batch_size`={batch_size} can fill "
            f"({num_layers * batch_size} devices); lower `num_devices` or raise `batch_size`"
        )


def check_constraints(constraints: PlanConstraints, layers: range, num_devices: int, batch_size: int) -> None:
    """Refuses pins that leave no candidate for the layers that run.

    Raises:
        InfeasiblePlan: With the numbers and the options to change.
    """
    if constraints.stages:
        _check_stages(constraints, constraints.stages, layers)
    _check_chunks(constraints, len(layers))
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


def _check_chunks(constraints: PlanConstraints, num_layers: int) -> None:
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
        told = "" if stages_per_rank == 1 else f" / `stages_per_rank`={stages_per_rank}"
        raise InfeasiblePlan(
            f"`num_stages`={num_stages or pipeline_size * stages_per_rank}{told} x `num_replicas`="
            f"{num_replicas} need {pipeline_size * num_replicas} devices, and there are {num_devices}; lower one of "
            "them or raise `num_devices`"
        )


def _smallest_pipeline(constraints: PlanConstraints) -> int:
    """The fewest devices that the fixed stages can be on."""
    num_stages = constraints.fixed_num_stages
    if num_stages is None:
        return 2 if (constraints.stages_per_rank or 1) > 1 else 1
    return num_stages // max(chunk_counts(constraints, num_stages))


def chunk_counts(constraints: PlanConstraints, num_stages: int) -> list[int]:
    """How many stages each device can hold: one, or up to four on two or more devices.

    More take more memory and transfers than they save waiting. Stages that the user gives are one for each device.
    """
    if constraints.stages_per_rank is not None:
        counts: tuple[int, ...] = (constraints.stages_per_rank,)
    else:
        counts = (1,) if constraints.stages or constraints.schedule in ("gpipe", "1f1b") else (1, 2, 3, 4)
    return [count for count in counts if num_stages % count == 0 and (count == 1 or num_stages > count)]


def _check_batch(constraints: PlanConstraints, batch_size: int) -> None:
    num_replicas, num_microbatches = constraints.num_replicas or 1, constraints.num_microbatches or 1
    share = -(-batch_size // num_replicas)
    if num_replicas > batch_size or num_microbatches > share:
        raise InfeasiblePlan(
            f"`num_replicas`={num_replicas} x `num_microbatches`={num_microbatches} is more than "
            f"`batch_size`={batch_size} has samples for; lower one of them or raise `batch_size`"
        )
    pipeline_size, most_microbatches = _smallest_pipeline(constraints), constraints.num_microbatches or share
    if constraints.schedule == "1f1b" and most_microbatches < pipeline_size:
        raise InfeasiblePlan(
            f"`schedule`=1f1b needs a micro-batch for each of `num_stages`={pipeline_size} stages, and "
            f"`num_microbatches` is at most {most_microbatches} (`num_replicas`={num_replicas}, "
            f"`batch_size`={batch_size}); change one of them or take `schedule`=gpipe"
        )

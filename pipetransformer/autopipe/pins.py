"""What the user fixes of a plan, and what to say where that cannot be."""

from dataclasses import dataclass

from pipetransformer.autopipe.partition import Runs
from pipetransformer.autopipe.plan import SCHEDULES


class NoPlan(ValueError):
    """No plan meets the memory budget or what is fixed."""


@dataclass(frozen=True)
class Pins:
    """What is fixed instead of searched; ``None`` leaves it to the search.

    Attributes:
        num_stages: Stages of a pipeline, over all its devices.
        num_replicas: Pipelines side by side.
        num_microbatches: Micro-batches of each replica's share.
        schedule: One of :data:`~pipetransformer.autopipe.plan.SCHEDULES`.
        stages: The exact layers ``(first, last)`` of each stage.
        checkpoint: Activation checkpointing.
        num_chunks: Stages of each device.

    Raises:
        ValueError: The schedule is unknown or cannot hold the chunks, or a number is below 1.
    """

    num_stages: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    stages: Runs | None = None
    checkpoint: bool | None = None
    num_chunks: int | None = None

    def __post_init__(self) -> None:
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise ValueError(f"parallel.schedule={self.schedule} does not exist; choose one of {', '.join(SCHEDULES)}")
        for name in ("num_stages", "num_replicas", "num_microbatches", "num_chunks"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"parallel.{name}={number} must be at least 1, or null to let the planner choose")
        if (self.num_chunks or 1) > 1 and self.schedule not in (None, "interleaved1f1b"):
            raise ValueError(
                f"parallel.schedule={self.schedule} runs one stage on each device; drop parallel.num_chunks="
                f"{self.num_chunks} or take parallel.schedule=interleaved1f1b"
            )

    @property
    def fixed_num_stages(self) -> int | None:
        return len(self.stages) if self.stages else self.num_stages


FREE = Pins()


def check_world(num_devices: int, num_layers: int, batch_size: int) -> None:
    """Refuses more devices than one layer and one sample each could fill.

    Raises:
        NoPlan: With the numbers and the options to change.
    """
    if num_devices > num_layers * batch_size:
        raise NoPlan(
            f"parallel.world_size={num_devices} is more than {num_layers} layers x batch_size={batch_size} can fill "
            f"({num_layers * batch_size} devices); lower parallel.world_size or raise batch_size"
        )


def check_pins(pins: Pins, layers: range, num_devices: int, batch_size: int) -> None:
    """Refuses pins that leave no candidate for the layers that run.

    Raises:
        NoPlan: With the numbers and the options to change.
    """
    if pins.stages:
        _check_stages(pins, pins.stages, layers)
    _check_chunks(pins, len(layers))
    _check_devices(pins, len(layers), num_devices)
    _check_batch(pins, batch_size)


def _check_stages(pins: Pins, stages: Runs, layers: range) -> None:
    if [layer for first, last in stages for layer in range(first, last + 1)] != list(layers):
        raise NoPlan(
            f"the fixed stages {stages} do not cover layers {layers[0]} to {layers[-1]} once and in order; they must "
            "start at the first layer that is not cached and end at the head"
        )
    if pins.num_stages not in (None, len(stages)):
        raise NoPlan(f"parallel.num_stages={pins.num_stages} contradicts the fixed stages {stages}; drop one")


def _check_chunks(pins: Pins, num_layers: int) -> None:
    num_chunks, num_stages = pins.num_chunks or 1, pins.fixed_num_stages
    if num_chunks == 1:
        return
    if num_stages is not None and (num_stages % num_chunks or num_stages == num_chunks):
        raise NoPlan(
            f"parallel.num_stages={num_stages} cannot be {num_chunks} stages (parallel.num_chunks) on each of two or "
            f"more devices; take parallel.num_stages={2 * num_chunks} or a larger multiple of {num_chunks}"
        )
    if num_stages is None and num_layers < 2 * num_chunks:
        raise NoPlan(
            f"parallel.num_chunks={num_chunks} needs {2 * num_chunks} layers for two devices, and {num_layers} run; "
            "lower parallel.num_chunks"
        )


def _check_devices(pins: Pins, num_layers: int, num_devices: int) -> None:
    num_stages, num_chunks, num_replicas = pins.fixed_num_stages, pins.num_chunks or 1, pins.num_replicas or 1
    if (num_stages or 1) > num_layers:
        raise NoPlan(
            f"parallel.num_stages={num_stages} is more than the {num_layers} layers that run; lower parallel.num_stages"
        )
    pipeline_size = _smallest_pipeline(pins)
    if pipeline_size * num_replicas > num_devices:
        told = "" if num_chunks == 1 else f" / parallel.num_chunks={num_chunks}"
        raise NoPlan(
            f"parallel.num_stages={num_stages or pipeline_size * num_chunks}{told} x parallel.num_replicas="
            f"{num_replicas} need {pipeline_size * num_replicas} devices, and there are {num_devices}; lower one of "
            "them or raise parallel.world_size"
        )


def _smallest_pipeline(pins: Pins) -> int:
    """The fewest devices that the fixed stages can be on."""
    num_stages = pins.fixed_num_stages
    if num_stages is None:
        return 2 if (pins.num_chunks or 1) > 1 else 1
    return num_stages // max(chunk_counts(pins, num_stages))


def chunk_counts(pins: Pins, num_stages: int) -> list[int]:
    """How many stages each device can hold: one, or up to four on two or more devices.

    More take more memory and transfers than they save waiting. Stages that the user gives are one for each device.
    """
    if pins.num_chunks is not None:
        counts: tuple[int, ...] = (pins.num_chunks,)
    else:
        counts = (1,) if pins.stages or pins.schedule in ("gpipe", "1f1b") else (1, 2, 3, 4)
    return [count for count in counts if num_stages % count == 0 and (count == 1 or num_stages > count)]


def _check_batch(pins: Pins, batch_size: int) -> None:
    num_replicas, num_microbatches = pins.num_replicas or 1, pins.num_microbatches or 1
    share = -(-batch_size // num_replicas)
    if num_replicas > batch_size or num_microbatches > share:
        raise NoPlan(
            f"parallel.num_replicas={num_replicas} x parallel.num_microbatches={num_microbatches} is more than "
            f"batch_size={batch_size} has samples for; lower one of them or raise batch_size"
        )
    pipeline_size, most_microbatches = _smallest_pipeline(pins), pins.num_microbatches or share
    if pins.schedule == "1f1b" and most_microbatches < pipeline_size:
        raise NoPlan(
            f"parallel.schedule=1f1b needs a micro-batch for each of parallel.num_stages={pipeline_size} stages, and "
            f"parallel.num_microbatches is at most {most_microbatches} (parallel.num_replicas={num_replicas}, "
            f"batch_size={batch_size}); change one of them or take parallel.schedule=gpipe"
        )

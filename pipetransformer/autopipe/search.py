"""The fastest feasible plan: every number of stages, replicas and micro-batches, each with its exact partition."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, floor, inf, log10

from pipetransformer.autopipe.cost import (
    Cluster,
    MemoryCosts,
    Profile,
    UpdateCosts,
    boundary_seconds,
    layer_time,
    microbatch_size,
    num_in_flight,
    step_seconds,
)
from pipetransformer.autopipe.partition import Runs, partition
from pipetransformer.autopipe.plan import SCHEDULES, Plan

_SAME = 1 - 1e-9  # a plan must be faster by more than rounding to replace a simpler one


class NoPlan(ValueError):
    """No plan meets the memory budget or what is fixed."""


@dataclass(frozen=True)
class Pins:
    """What is fixed instead of searched; ``None`` leaves it to the search.

    Attributes:
        num_stages: Stages of a pipeline.
        num_replicas: Pipelines side by side.
        num_microbatches: Micro-batches of each replica's share.
        schedule: One of :data:`~pipetransformer.autopipe.plan.SCHEDULES`.
        stages: The exact layers ``(first, last)`` of each stage.

    Raises:
        ValueError: The schedule is unknown, or a number is below 1.
    """

    num_stages: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    stages: Runs | None = None

    def __post_init__(self) -> None:
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise ValueError(f"parallel.schedule={self.schedule} does not exist; choose one of {', '.join(SCHEDULES)}")
        for name in ("num_stages", "num_replicas", "num_microbatches"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"parallel.{name}={number} must be at least 1, or null to let the planner choose")


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


def best_plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    num_frozen: int = 0,
    cache_level: int = 0,
    pins: Pins = FREE,
) -> Plan:
    """The fastest plan by :func:`~pipetransformer.autopipe.cost.step_seconds` that fits the memory of the devices.

    Considers every number of stages and replicas that the devices allow, 1, 2, 3, 4, 6, 8, 12, ... micro-batches, and
    for each of these all partitions worth it: from the fastest slowest stage to the fastest slowest update. That is
    exact where all boundaries take equally long; below the frozen prefix, where no gradient comes back, it may miss the
    optimum by a transfer. Of equally fast plans (to rounding) it takes the one with fewer stages, then fewer
    micro-batches, then fewer replicas: every rank finds the same one, and devices stay idle where they do not help.

    Raises:
        NoPlan: Nothing fits the memory, or the pins cannot be met.
    """
    search = _Search(profile, cluster, batch_size, num_frozen, cache_level, pins)
    search.check_pins()
    best: Plan | None = None
    for grid in search.grids():
        limit_s = best.predicted_step_s * _SAME if best else inf
        best = search.fastest(grid, limit_s) or best
    if best is None:
        raise NoPlan(search.explain_memory())
    return best


def _gib_upwards(num_bytes: float) -> float:
    """GiB with four digits that are enough for the bytes."""
    unit = 10.0 ** (floor(log10(num_bytes / 2**30)) - 3)
    return ceil(num_bytes / 2**30 / unit) * unit


@dataclass(frozen=True, order=True)
class _Grid:
    """A candidate without its partition, in the order of preference.

    Attributes:
        num_stages, num_microbatches, num_replicas, schedule: As in the plan.
        num_samples: Of each micro-batch.
    """

    num_stages: int
    num_microbatches: int
    num_replicas: int
    schedule: str
    num_samples: int


RunCost = Callable[[int, int, int], float]  # of (stage, first, last), layers counted over the whole model


class _Search:
    """The candidates for one frozen prefix and cache level, and what they cost."""

    def __init__(
        self, profile: Profile, cluster: Cluster, batch_size: int, num_frozen: int, cache_level: int, pins: Pins
    ) -> None:
        self.profile, self.cluster, self.batch_size = profile, cluster, batch_size
        self.num_frozen, self.cache_level, self.pins = num_frozen, cache_level, pins
        self.num_stages = len(pins.stages) if pins.stages else pins.num_stages
        self.layers = range(cache_level + 1 if cache_level else 0, len(profile.layers))
        self.times = [layer_time(profile, layer, num_frozen) for layer in self.layers]
        self.memory = MemoryCosts(profile, num_frozen)

    def check_pins(self) -> None:
        """Raises NoPlan where the pins leave no candidate."""
        if self.pins.stages:
            self._check_stages(self.pins.stages)
        num_stages, num_replicas = self.num_stages or 1, self.pins.num_replicas or 1
        self._check_devices(num_stages, num_replicas)
        self._check_batch(num_stages, num_replicas)

    def grids(self) -> list[_Grid]:
        """All candidates, the simplest first."""
        num_devices = self.cluster.num_devices
        grids = [
            self._grid(num_stages, num_replicas, num_microbatches)
            for num_stages in _counts(self.num_stages, min(num_devices, len(self.layers)))
            for num_replicas in _counts(self.pins.num_replicas, min(num_devices // num_stages, self.batch_size))
            for num_microbatches in self._microbatch_counts(num_replicas)
        ]
        return sorted(grid for grid in grids if grid.schedule == "gpipe" or grid.num_microbatches >= grid.num_stages)

    def fastest(self, grid: _Grid, limit_s: float) -> Plan | None:
        """The fastest plan of a grid, if it fits and takes less than ``limit_s``."""
        seconds = [time.at(grid.num_samples) for time in self.times]
        slowest_s = max(max(seconds), sum(seconds) / grid.num_stages)
        if sum(seconds) + (grid.num_microbatches - 1) * slowest_s >= limit_s:
            return None
        best: Plan | None = None
        for stages in self._improving(grid, seconds, self._update_seconds_within_budget(grid), inf):
            plan = self._plan(grid, stages)
            if plan.predicted_step_s < limit_s:
                best, limit_s = plan, plan.predicted_step_s * _SAME
        return best

    def explain_memory(self) -> str:
        """What to do when nothing fits: the smallest budget with which something would."""
        smallest, leanest = inf, None
        for grid in self.grids():
            cost = self._stage_bytes(grid)
            weights = [cost(0, layer, layer) for layer in self.layers]  # starts from a balance of bytes, not of time
            for stages in self._improving(grid, weights, cost, smallest):
                smallest, leanest = _largest(cost, stages), grid
        assert leanest is not None
        return (
            f"no plan fits parallel.device_memory_gib={(self.cluster.device_memory_bytes or 0) / 2**30:.4g}: it takes "
            f"at least {_gib_upwards(smallest):.4g} GiB per device (with {leanest.num_stages} stages, "
            f"{leanest.num_replicas} replicas and {leanest.num_microbatches} micro-batches) at "
            f"batch_size={self.batch_size}; raise parallel.device_memory_gib or parallel.world_size, or lower "
            "batch_size"
        )

    def _improving(self, grid: _Grid, seconds: list[float], cost: RunCost, limit: float) -> Iterator[Runs]:
        """Partitions whose largest cost is ever smaller, from below ``limit``; each is the fastest with its cost."""
        if self.pins.stages:
            if _largest(cost, self.pins.stages) < limit:
                yield self.pins.stages
            return
        offset, boundaries = self.layers.start, self._boundary_seconds(grid.num_samples)

        def fits(stage: int, first: int, last: int) -> bool:
            return cost(stage, first + offset, last + offset) < limit

        while runs := partition(seconds, grid.num_stages, fits, boundaries):
            stages = tuple((first + offset, last + offset) for first, last in runs)
            yield stages
            limit = _largest(cost, stages)

    def _update_seconds_within_budget(self, grid: _Grid) -> RunCost:
        """Seconds of a run's all-reduce and optimizer; infinite where the run does not fit the device."""
        updates = UpdateCosts(self.profile, self.cluster, self.num_frozen, grid.num_replicas)
        stage_bytes = self._stage_bytes(grid)
        budget_bytes = self.cluster.device_memory_bytes

        def cost(stage: int, first: int, last: int) -> float:
            if budget_bytes is not None and stage_bytes(stage, first, last) > budget_bytes:
                return inf
            return updates.seconds(first, last)

        return cost

    def _stage_bytes(self, grid: _Grid) -> RunCost:
        """Memory of a run on the device of a stage."""

        def cost(stage: int, first: int, last: int) -> float:
            waiting = num_in_flight(grid.schedule, stage, grid.num_stages, grid.num_microbatches)
            return self.memory.bytes(first, last, grid.num_samples, grid.num_microbatches, waiting)

        return cost

    def _boundary_seconds(self, num_samples: int) -> list[float]:
        return [
            boundary_seconds(self.profile, self.cluster, layer, self.num_frozen, num_samples) for layer in self.layers
        ]

    def _plan(self, grid: _Grid, stages: Runs) -> Plan:
        plan = Plan(self.num_frozen, self.cache_level, stages, grid.num_replicas, grid.num_microbatches, grid.schedule)
        return replace(plan, predicted_step_s=step_seconds(self.profile, self.cluster, plan, self.batch_size))

    def _grid(self, num_stages: int, num_replicas: int, num_microbatches: int) -> _Grid:
        # both schedules take the same time and 1f1b less memory, but torch runs it only with a micro-batch per stage
        schedule = self.pins.schedule or ("1f1b" if num_microbatches >= num_stages else "gpipe")
        num_samples = microbatch_size(self.batch_size, num_replicas, num_microbatches)
        return _Grid(num_stages, num_microbatches, num_replicas, schedule, num_samples)

    def _microbatch_counts(self, num_replicas: int) -> Iterable[int]:
        """1, 2, 3, 4, 6, 8, 12, ... and one for each sample of the share, which needs the least memory."""
        share = self._share(num_replicas)
        if self.pins.num_microbatches is not None:
            return _counts(self.pins.num_microbatches, share)
        powers = [2**exponent for exponent in range(share.bit_length())]
        return {count for power in powers for count in (power, 3 * power // 2) if count <= share} | {share}

    def _share(self, num_replicas: int) -> int:
        return microbatch_size(self.batch_size, num_replicas, num_microbatches=1)

    def _check_stages(self, stages: Runs) -> None:
        if [layer for first, last in stages for layer in range(first, last + 1)] != list(self.layers):
            raise NoPlan(
                f"the fixed stages {stages} do not cover layers {self.layers[0]} to {self.layers[-1]} once and in "
                "order; they must start at the first layer that is not cached and end at the head"
            )
        if self.pins.num_stages not in (None, len(stages)):
            raise NoPlan(f"parallel.num_stages={self.pins.num_stages} contradicts the fixed stages {stages}; drop one")

    def _check_devices(self, num_stages: int, num_replicas: int) -> None:
        if num_stages > len(self.layers):
            raise NoPlan(
                f"parallel.num_stages={num_stages} is more than the {len(self.layers)} layers that run at cache level "
                f"{self.cache_level}; lower parallel.num_stages"
            )
        if num_stages * num_replicas > self.cluster.num_devices:
            raise NoPlan(
                f"parallel.num_stages={num_stages} x parallel.num_replicas={num_replicas} need "
                f"{num_stages * num_replicas} devices, and there are {self.cluster.num_devices}; lower one of them or "
                "raise parallel.world_size"
            )

    def _check_batch(self, num_stages: int, num_replicas: int) -> None:
        share = self._share(num_replicas)
        num_microbatches = self.pins.num_microbatches or 1
        if num_replicas > self.batch_size or num_microbatches > share:
            raise NoPlan(
                f"parallel.num_replicas={num_replicas} x parallel.num_microbatches={num_microbatches} is more than "
                f"batch_size={self.batch_size} has samples for; lower one of them or raise batch_size"
            )
        most_microbatches = self.pins.num_microbatches or share
        if self.pins.schedule == "1f1b" and most_microbatches < num_stages:
            raise NoPlan(
                f"parallel.schedule=1f1b needs a micro-batch for each of parallel.num_stages={num_stages} stages, and "
                f"parallel.num_microbatches is at most {most_microbatches} (parallel.num_replicas={num_replicas}, "
                f"batch_size={self.batch_size}); change one of them or take parallel.schedule=gpipe"
            )


def _counts(pin: int | None, most: int) -> range:
    """All counts up to ``most``, or the pinned one if it is among them."""
    return range(1, most + 1) if pin is None else range(pin, min(pin, most) + 1)


def _largest(cost: RunCost, stages: Runs) -> float:
    return max(cost(stage, first, last) for stage, (first, last) in enumerate(stages))

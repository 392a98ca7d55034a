"""The exact partition for one layout: the fastest within the memory, or the one that takes least memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

from pipetransformer.autopipe.cluster import Cluster, Link, allreduce_links, boundary_links
from pipetransformer.autopipe.cost import (
    UpdateCosts,
    boundary_seconds,
    busy_seconds,
    running_times,
    schedule_overhead_seconds,
)
from pipetransformer.autopipe.memory import MemoryCosts
from pipetransformer.autopipe.plan import Layout, Plan, Stages, layer_above
from pipetransformer.autopipe.profile import PrefixSums, Profile
from pipetransformer.autopipe.schedules import SCHEDULES
from pipetransformer.autopipe.search.partition import interleave, partition

RELATIVE_TOLERANCE = 1 - 1e-9
"""A plan must be faster by more than rounding to replace a simpler one."""

DeviceCost = Callable[[int, Stages], float]  # of a pipeline's device and its stages


class PartitionSolver:
    """Finds partitions for one frozen prefix and cache level.

    Attributes:
        layers: The layers that run.
        times: Seconds of each of them, without and with recomputing.
        memory: Bytes, likewise.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        batch_size: int,
        num_frozen: int,
        cache_level: int,
        fixed: Stages | None,
    ) -> None:
        self.profile, self.cluster, self.batch_size = profile, cluster, batch_size
        self.num_frozen, self.cache_level = num_frozen, cache_level
        self.layers = range(layer_above(cache_level), len(profile.layers))
        self.times = [running_times(profile, num_frozen, cache_level, recompute) for recompute in (False, True)]
        self.memory = [MemoryCosts(profile, num_frozen, recompute, cache_level) for recompute in (False, True)]
        self._fixed = fixed and _shifted(fixed, -self.layers.start)

    def fastest(self, layout: Layout, limit_s: float, least_update_s: float) -> Plan | None:
        """Returns the fastest plan of a layout, if it fits and takes less than ``limit_s``.

        Seconds are those of pipeline and update here, without the scale of a step, the plan's too.
        ``least_update_s`` is a bound on what the devices need after the pipeline.
        """
        costs = LayoutCosts(self, layout, self.cluster.device_memory_bytes)
        if self._fixed or layout.stages_per_rank == 1:
            return self._fastest_cut(costs, limit_s, least_update_s)
        stages = interleave(costs.seconds, layout.num_stages, _StepBound(costs), limit_s)
        return self._plan(layout, stages) if stages else None

    def _fastest_cut(self, costs: "LayoutCosts", limit_s: float, least_update_s: float) -> Plan | None:
        """Looks from the partition with the fastest slowest stage to the one with the fastest slowest update."""
        best: Plan | None = None
        layout, seconds, schedule = costs.layout, costs.seconds, SCHEDULES[costs.layout.schedule]
        # the slowest stage and the slowest update may take what is left where all else is as fast as it can be
        balanced_s = max(max(seconds), sum(seconds) / layout.num_stages)
        busiest_s = max(balanced_s, sum(seconds) / layout.pipeline_size)
        pipeline_s = schedule.makespan_of(sum(seconds), balanced_s, busiest_s, layout)
        update_limit_s = limit_s / RELATIVE_TOLERANCE - pipeline_s
        stage_limit_s = schedule.slowest_within(limit_s / RELATIVE_TOLERANCE - least_update_s, sum(seconds), layout)
        for stages in self._improving(costs, costs.update_seconds, update_limit_s, seconds, stage_limit_s):
            plan = self._plan(layout, stages)
            if plan.predicted_step_s < limit_s:
                best, limit_s = plan, plan.predicted_step_s * RELATIVE_TOLERANCE
            # later partitions have slower pipelines, and no update is faster than the bound
            if plan.predicted_step_s - costs.largest(costs.update_seconds, stages) + least_update_s >= limit_s:
                break
        return best

    def min_memory(self, layout: Layout, limit_bytes: float) -> float | None:
        """Returns the smallest budget with which a layout fits, if it is below a limit."""
        costs = LayoutCosts(self, layout, budget_bytes=None)
        if self._fixed or layout.stages_per_rank == 1:
            # the balance is one of bytes, not of time
            weights = [costs.device_bytes(0, ((layer, layer),)) for layer in range(len(self.layers))]
            cuts = self._improving(costs, costs.device_bytes, limit_bytes, weights)
            return min((costs.largest(costs.device_bytes, stages) for stages in cuts), default=None)
        stages = interleave(costs.seconds, layout.num_stages, costs.largest_bytes, limit_bytes)
        return costs.largest_bytes(stages) if stages else None

    def _improving(
        self, costs: "LayoutCosts", cost: DeviceCost, limit: float, weights: list[float], slowest_s: float = inf
    ) -> Iterator[Stages]:
        """Yields partitions whose largest device cost is ever smaller, from below ``limit``.

        Each is the fastest one with its cost, and none has a stage slower than ``slowest_s``, by the weights of layers.
        """
        if self._fixed:
            if costs.largest_fits(self._fixed) and costs.largest(cost, self._fixed) < limit:
                yield self._fixed
            return

        def fits(stage: int, first: int, last: int) -> bool:
            run = ((first, last),)
            return costs.fits(stage, run) and cost(stage, run) < limit

        while stages := partition(weights, costs.layout.num_stages, fits, costs.boundary_s, slowest_s):
            yield stages
            limit = costs.largest(cost, stages)  # the next partition has to be cheaper on its dearest device

    def _plan(self, layout: Layout, stages: Stages) -> Plan:
        stages = _shifted(stages, self.layers.start)
        plan = Plan.laid_out(layout, self.num_frozen, self.cache_level, stages)
        return replace(plan, predicted_step_s=busy_seconds(self.profile, self.cluster, plan, self.batch_size))


class LayoutCosts:
    """Costs of stages under one layout. Layers are counted from the first one that runs.

    Attributes:
        seconds: Of each layer, per micro-batch.
        boundary_s: What each stage takes besides its layers, by its last layer; a row for each stage.
    """

    def __init__(self, solver: PartitionSolver, layout: Layout, budget_bytes: int | None) -> None:
        self.layout, self._solver, self._budget_bytes = layout, solver, budget_bytes
        self._num_samples = layout.microbatch_size(solver.batch_size)
        self.seconds = [time.at(self._num_samples) for time in solver.times[layout.recompute]]
        self.boundary_s = self._boundary_rows()
        links = allreduce_links(solver.cluster, layout.devices)
        self._updates = UpdateCosts(solver.profile, solver.num_frozen, layout.num_replicas, links)
        schedule = SCHEDULES[layout.schedule]
        self._moments = [schedule.moments(device, layout) for device in range(layout.pipeline_size)]
        self.device_bytes = lru_cache(maxsize=None)(self._device_bytes)
        self.update_seconds = lru_cache(maxsize=None)(self._update_seconds)

    def _device_bytes(self, device: int, stages: Stages) -> float:
        """Bytes of a device with these stages."""
        layout, memory = self.layout, self._solver.memory[self.layout.recompute]
        stages = _shifted(stages, self._solver.layers.start)
        moments, num_microbatches = self._moments[device], layout.num_microbatches
        return memory.bytes(stages, self._num_samples, num_microbatches, moments, layout.num_replicas)

    def _update_seconds(self, device: int, stages: Stages) -> float:
        """Seconds of a device's all-reduce and optimizer."""
        return self._updates.seconds(device, _shifted(stages, self._solver.layers.start))

    def fits(self, device: int, stages: Stages) -> bool:
        """Returns whether a device has the memory for these stages."""
        return self._budget_bytes is None or self.device_bytes(device, stages) <= self._budget_bytes

    def largest(self, cost: DeviceCost, stages: Stages) -> float:
        """Returns the cost of the dearest device; ``stages`` may be only the lowest ones."""
        size = self.layout.pipeline_size
        return max(cost(device, stages[device::size]) for device in range(min(size, len(stages))))

    def largest_bytes(self, stages: Stages) -> float:
        """Returns the bytes of the fullest device."""
        return self.largest(self.device_bytes, stages)

    def largest_fits(self, stages: Stages) -> bool:
        """Returns whether every device has the memory for its stages."""
        return self._budget_bytes is None or self.largest_bytes(stages) <= self._budget_bytes

    def _boundary_rows(self) -> list[list[float]]:
        solver, layout = self._solver, self.layout
        links = boundary_links(solver.cluster, layout.devices) * layout.stages_per_rank
        overheads_s = (schedule_overhead_seconds(solver.profile, layout, stage) for stage in range(layout.num_stages))
        stages = list(zip(links, overheads_s, strict=True))
        rows = {stage: self._boundary_row(*stage) for stage in set(stages)}
        return [rows[stage] for stage in stages]

    def _boundary_row(self, link: Link, overhead_s: float) -> list[float]:
        solver, num_samples = self._solver, self._num_samples
        return [
            overhead_s + boundary_seconds(solver.profile, link, layer, solver.num_frozen, num_samples)
            for layer in solver.layers
        ]


class _Begun(NamedTuple):
    """A step of which only the lowest stages are known; more stages never take less.

    Attributes:
        stage_s, device_s: Seconds of each stage so far, and of each device.
        update_s: The slowest update so far.
        fits: All devices have the memory so far.
    """

    stage_s: tuple[float, ...]
    device_s: tuple[float, ...]
    update_s: float
    fits: bool


class _StepBound:
    """Seconds that a step takes at least, from its lowest stages: the rest is as even as can be, and updated for free.

    Each call adds one stage to stages that an earlier call has had.
    """

    def __init__(self, costs: LayoutCosts) -> None:
        self._costs, self._layout, self._schedule = costs, costs.layout, SCHEDULES[costs.layout.schedule]
        self._run_seconds = PrefixSums(costs.seconds)
        self._left_s = [*reversed([*accumulate(reversed(costs.seconds), initial=0.0)])]  # from a layer up to the head
        self._begun: dict[Stages, _Begun] = {(): _Begun((), (0.0,) * self._layout.pipeline_size, 0.0, True)}

    def __call__(self, stages: Stages) -> float:
        begun = self._begun[stages] = self._add_last(self._begun[stages[:-1]], stages)
        if not begun.fits:
            return inf
        if len(stages) == self._layout.num_stages:
            return self._schedule.makespan(begun.stage_s, self._layout) + begun.update_s
        total_s = sum(begun.stage_s) + self._left_s[stages[-1][1] + 1]
        busiest_s = max(total_s / self._layout.pipeline_size, *begun.device_s)
        return self._schedule.makespan_of(total_s, max(begun.stage_s), busiest_s, self._layout) + begun.update_s

    def _add_last(self, begun: _Begun, stages: Stages) -> _Begun:
        """Returns the state with the last of the stages added."""
        size, stage, (first, last) = self._layout.pipeline_size, len(stages) - 1, stages[-1]
        device, own = stage % size, stages[stage % size :: size]
        stage_s = self._run_seconds(first, last) + self._costs.boundary_s[stage][last]
        device_s = list(begun.device_s)
        device_s[device] += stage_s
        if not self._costs.fits(device, own):
            return begun._replace(fits=False)
        update_s = max(begun.update_s, self._costs.update_seconds(device, own))
        return _Begun((*begun.stage_s, stage_s), tuple(device_s), update_s, True)


def _shifted(stages: Stages, offset: int) -> Stages:
    return tuple((first + offset, last + offset) for first, last in stages)

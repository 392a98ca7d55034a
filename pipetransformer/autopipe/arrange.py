"""The exact partition of one candidate: the fastest within the memory, or the leanest."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate
from math import inf

from pipetransformer.autopipe.candidates import Grid
from pipetransformer.autopipe.cluster import Cluster, Link, boundary_links, ring_links
from pipetransformer.autopipe.cost import (
    Profile,
    RunSums,
    UpdateCosts,
    boundary_seconds,
    pass_seconds,
    pipeline_seconds,
    running_times,
    step_seconds,
)
from pipetransformer.autopipe.interleave import interleave
from pipetransformer.autopipe.memory import MemoryCosts, in_flight
from pipetransformer.autopipe.partition import Runs, partition
from pipetransformer.autopipe.plan import Plan, layer_above

SAME = 1 - 1e-9
"""A plan must be faster by more than rounding to replace a simpler one."""

DeviceCost = Callable[[int, Runs], float]  # of a pipeline's device and its runs, layers counted over the whole model
SoFar = tuple[tuple[float, ...], tuple[float, ...], float]
"""Of the lowest stages: seconds of each, of each device, and of the slowest update; more stages never take less."""


class Arranger:
    """Finds partitions for one frozen prefix and cache level.

    Attributes:
        layers: Those that run.
        times: What each of them takes, without and with activation checkpointing.
        memory: Likewise.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, batch_size: int, num_frozen: int, cache_level: int, fixed: Runs | None
    ) -> None:
        self.profile, self.cluster, self.batch_size = profile, cluster, batch_size
        self.num_frozen, self.cache_level, self._fixed = num_frozen, cache_level, fixed
        self.layers = range(layer_above(cache_level), len(profile.layers))
        self.times = [running_times(profile, num_frozen, cache_level, checkpoint) for checkpoint in (False, True)]
        self.memory = [MemoryCosts(profile, num_frozen, checkpoint, cache_level) for checkpoint in (False, True)]

    def fastest(self, grid: Grid, limit_s: float, least_update_s: float) -> Plan | None:
        """The fastest plan of a candidate, if it fits and takes less than ``limit_s``.

        ``least_update_s`` is a bound on what the devices need after the pipeline.
        """
        cost = lru_cache(maxsize=None)(self._update_seconds_within_budget(grid))
        if self._fixed or grid.num_chunks == 1:
            return self._fastest_of_improving(grid, cost, limit_s, least_update_s)
        stages = self._interleave(grid, self._step_bound(grid, cost), limit_s)
        return self._plan(grid, stages) if stages else None

    def leanest(self, grid: Grid, limit_bytes: float) -> float | None:
        """The smallest budget with which the candidate fits, if it is below a limit."""
        cost = lru_cache(maxsize=None)(self._device_bytes(grid))
        if self._fixed or grid.num_chunks == 1:
            weights = [cost(0, ((layer, layer),)) for layer in self.layers]  # starts from a balance of bytes, not time
            sizes = (_largest(grid, cost, stages) for stages in self._improving(grid, weights, cost, limit_bytes))
            return min(sizes, default=None)
        stages = self._interleave(grid, lambda runs: _largest(grid, cost, self._over_model(runs)), limit_bytes)
        return _largest(grid, cost, stages) if stages else None

    def _fastest_of_improving(self, grid: Grid, cost: DeviceCost, limit_s: float, least_update_s: float) -> Plan | None:
        """Looks from the fastest slowest stage to the fastest slowest update."""
        best: Plan | None = None
        seconds = self._seconds(grid)
        num_later = grid.num_microbatches - 1
        # what the slowest stage and the slowest update may take where all else is as fast as it can be
        slowest_s = (limit_s / SAME - least_update_s - sum(seconds)) / num_later if num_later else inf
        balanced_s = sum(seconds) + num_later * max(max(seconds), sum(seconds) / grid.num_stages)
        for stages in self._improving(grid, seconds, cost, limit_s / SAME - balanced_s, slowest_s):
            plan = self._plan(grid, stages)
            if plan.predicted_step_s < limit_s:
                best, limit_s = plan, plan.predicted_step_s * SAME
            if plan.predicted_step_s - _largest(grid, cost, stages) + least_update_s >= limit_s:
                break
        return best

    def _improving(
        self, grid: Grid, weights: list[float], cost: DeviceCost, limit: float, slowest_s: float = inf
    ) -> Iterator[Runs]:
        """Partitions whose largest cost is ever smaller, from below ``limit``; each is the fastest with its cost.

        Only those without a stage slower than ``slowest_s``.
        """
        if self._fixed:
            if _largest(grid, cost, self._fixed) < limit:
                yield self._fixed
            return
        offset, boundaries = self.layers.start, self._boundary_seconds(grid)

        def fits(stage: int, first: int, last: int) -> bool:
            return cost(stage, ((first + offset, last + offset),)) < limit

        while runs := partition(weights, grid.num_stages, fits, boundaries, slowest_s):
            stages = self._over_model(runs)
            yield stages
            limit = _largest(grid, cost, stages)

    def _interleave(self, grid: Grid, bound: Callable[[Runs], float], limit: float) -> Runs | None:
        runs = interleave(self._seconds(grid), grid.num_stages, bound, limit)
        return runs and self._over_model(runs)

    def _step_bound(self, grid: Grid, cost: DeviceCost) -> Callable[[Runs], float]:
        """Seconds of a step that begins with these stages: the rest as even as can be, and updated for free."""
        seconds, num_chunks, size = self._seconds(grid), grid.num_chunks, grid.pipeline_size
        so_far, left = self._so_far(grid, cost), list(accumulate(reversed(seconds), initial=0.0))

        def bound(runs: Runs) -> float:
            stages, devices, update_s = so_far(runs)
            if len(runs) == grid.num_stages:
                return pipeline_seconds(stages, grid.num_microbatches, num_chunks) + update_s
            total = sum(stages) + left[len(seconds) - runs[-1][1] - 1]
            busiest = max(total / size, *devices)
            return grid.num_microbatches * busiest + (total - busiest) / num_chunks + update_s

        return bound

    def _so_far(self, grid: Grid, cost: DeviceCost) -> Callable[[Runs], SoFar]:
        """Adds a stage to what is known of those below it."""
        run_seconds, boundaries, size = RunSums(self._seconds(grid)), self._boundary_seconds(grid), grid.pipeline_size

        @cache
        def so_far(runs: Runs) -> SoFar:
            if not runs:
                return (), (0.0,) * size, 0.0
            stages, devices, update_s = so_far(runs[:-1])
            stage, device = len(stages), len(stages) % size
            first, last = runs[-1]
            stage_s = run_seconds(first, last) + boundaries[stage][last]
            devices = (*devices[:device], devices[device] + stage_s, *devices[device + 1 :])
            return (*stages, stage_s), devices, max(update_s, cost(device, self._over_model(runs[device::size])))

        return so_far

    def _update_seconds_within_budget(self, grid: Grid) -> DeviceCost:
        """Seconds of a device's all-reduce and optimizer; infinite where its layers do not fit."""
        links = ring_links(self.cluster, grid.pipeline_size, grid.num_replicas, grid.replicas_adjacent)
        updates = UpdateCosts(self.profile, self.num_frozen, grid.num_replicas, links)
        device_bytes, budget_bytes = self._device_bytes(grid), self.cluster.device_memory_bytes

        def cost(device: int, runs: Runs) -> float:
            if budget_bytes is not None and device_bytes(device, runs) > budget_bytes:
                return inf
            return updates.seconds(device, runs)

        return cost

    def _device_bytes(self, grid: Grid) -> DeviceCost:
        memory, num_microbatches = self.memory[grid.checkpoint], grid.num_microbatches
        moments = [
            in_flight(grid.schedule, device, grid.pipeline_size, grid.num_chunks, num_microbatches)
            for device in range(grid.pipeline_size)
        ]

        def cost(device: int, runs: Runs) -> float:
            return memory.bytes(runs, grid.num_samples, num_microbatches, moments[device], grid.num_replicas)

        return cost

    def _seconds(self, grid: Grid) -> list[float]:
        return [time.at(grid.num_samples) for time in self.times[grid.checkpoint]]

    def _boundary_seconds(self, grid: Grid) -> list[list[float]]:
        """What a stage takes besides its layers, by its last one; a row for each stage."""
        links = boundary_links(self.cluster, grid.pipeline_size, grid.num_replicas, grid.replicas_adjacent)
        pass_s = pass_seconds(self.profile, grid.num_stages)
        rows = {link: [pass_s + own for own in self._boundary_row(link, grid.num_samples)] for link in set(links)}
        return [rows[link] for link in links] * grid.num_chunks

    def _boundary_row(self, link: Link, num_samples: int) -> list[float]:
        return [boundary_seconds(self.profile, link, layer, self.num_frozen, num_samples) for layer in self.layers]

    def _over_model(self, runs: Runs) -> Runs:
        """With layers counted over the whole model."""
        offset = self.layers.start
        return tuple((first + offset, last + offset) for first, last in runs)

    def _plan(self, grid: Grid, stages: Runs) -> Plan:
        plan = Plan(
            num_frozen=self.num_frozen,
            cache_level=self.cache_level,
            stages=stages,
            num_replicas=grid.num_replicas,
            num_microbatches=grid.num_microbatches,
            schedule=grid.schedule,
            num_chunks=grid.num_chunks,
            checkpoint=grid.checkpoint,
            replicas_adjacent=grid.replicas_adjacent,
        )
        return replace(plan, predicted_step_s=step_seconds(self.profile, self.cluster, plan, self.batch_size))


def _largest(grid: Grid, cost: DeviceCost, stages: Runs) -> float:
    """The cost of the most expensive device that has stages yet."""
    size = grid.pipeline_size
    return max(cost(device, stages[device::size]) for device in range(min(size, len(stages))))

"""The exact partition of one candidate: the fastest within the memory, or the leanest."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate
from math import inf

from pipetransformer.autopipe.cluster import Cluster, Link, allreduce_links, boundary_links
from pipetransformer.autopipe.cost import (
    PrefixSums,
    Profile,
    UpdateCosts,
    boundary_seconds,
    pipeline_makespan,
    running_times,
    schedule_overhead_seconds,
    step_seconds,
)
from pipetransformer.autopipe.memory import MemoryCosts, in_flight
from pipetransformer.autopipe.plan import Plan, Stages, layer_above
from pipetransformer.autopipe.search.candidates import Candidate
from pipetransformer.autopipe.search.interleave import interleave
from pipetransformer.autopipe.search.partition import partition

RELATIVE_TOLERANCE = 1 - 1e-9
"""A plan must be faster by more than rounding to replace a simpler one."""

DeviceCost = Callable[[int, Stages], float]  # of a pipeline's device and its runs, layers counted over the whole model
SoFar = tuple[tuple[float, ...], tuple[float, ...], float]
"""Of the lowest stages: seconds of each, of each device, and of the slowest update; more stages never take less."""


class PartitionSolver:
    """Finds partitions for one frozen prefix and cache level.

    Attributes:
        layers: Those that run.
        times: What each of them takes, without and with activation checkpointing.
        memory: Likewise.
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
        self.num_frozen, self.cache_level, self._fixed = num_frozen, cache_level, fixed
        self.layers = range(layer_above(cache_level), len(profile.layers))
        self.times = [running_times(profile, num_frozen, cache_level, recompute) for recompute in (False, True)]
        self.memory = [MemoryCosts(profile, num_frozen, recompute, cache_level) for recompute in (False, True)]

    def fastest(self, candidate: Candidate, limit_s: float, least_update_s: float) -> Plan | None:
        """The fastest plan of a candidate, if it fits and takes less than ``limit_s``.

        ``least_update_s`` is a bound on what the devices need after the pipeline.
        """
        cost = lru_cache(maxsize=None)(self._update_seconds_within_budget(candidate))
        if self._fixed or candidate.stages_per_rank == 1:
            return self._fastest_of_improving(candidate, cost, limit_s, least_update_s)
        stages = self._interleave(candidate, self._step_bound(candidate, cost), limit_s)
        return self._plan(candidate, stages) if stages else None

    def min_memory(self, candidate: Candidate, limit_bytes: float) -> float | None:
        """The smallest budget with which the candidate fits, if it is below a limit."""
        cost = lru_cache(maxsize=None)(self._device_bytes(candidate))
        if self._fixed or candidate.stages_per_rank == 1:
            weights = [cost(0, ((layer, layer),)) for layer in self.layers]  # starts from a balance of bytes, not time
            sizes = (
                _largest(candidate, cost, stages) for stages in self._improving(candidate, weights, cost, limit_bytes)
            )
            return min(sizes, default=None)
        stages = self._interleave(
            candidate, lambda runs: _largest(candidate, cost, self._over_model(runs)), limit_bytes
        )
        return _largest(candidate, cost, stages) if stages else None

    def _fastest_of_improving(
        self, candidate: Candidate, cost: DeviceCost, limit_s: float, least_update_s: float
    ) -> Plan | None:
        """Looks from the fastest slowest stage to the fastest slowest update."""
        best: Plan | None = None
        seconds = self._seconds(candidate)
        num_later = candidate.num_microbatches - 1
        # what the slowest stage and the slowest update may take where all else is as fast as it can be
        slowest_s = (limit_s / RELATIVE_TOLERANCE - least_update_s - sum(seconds)) / num_later if num_later else inf
        balanced_s = sum(seconds) + num_later * max(max(seconds), sum(seconds) / candidate.num_stages)
        for stages in self._improving(candidate, seconds, cost, limit_s / RELATIVE_TOLERANCE - balanced_s, slowest_s):
            plan = self._plan(candidate, stages)
            if plan.predicted_step_s < limit_s:
                best, limit_s = plan, plan.predicted_step_s * RELATIVE_TOLERANCE
            if plan.predicted_step_s - _largest(candidate, cost, stages) + least_update_s >= limit_s:
                break
        return best

    def _improving(
        self, candidate: Candidate, weights: list[float], cost: DeviceCost, limit: float, slowest_s: float = inf
    ) -> Iterator[Stages]:
        """Partitions whose largest cost is ever smaller, from below ``limit``; each is the fastest with its cost.

        Only those without a stage slower than ``slowest_s``.
        """
        if self._fixed:
            if _largest(candidate, cost, self._fixed) < limit:
                yield self._fixed
            return
        offset, boundaries = self.layers.start, self._boundary_seconds(candidate)

        def fits(stage: int, first: int, last: int) -> bool:
            return cost(stage, ((first + offset, last + offset),)) < limit

        while runs := partition(weights, candidate.num_stages, fits, boundaries, slowest_s):
            stages = self._over_model(runs)
            yield stages
            limit = _largest(candidate, cost, stages)

    def _interleave(self, candidate: Candidate, bound: Callable[[Stages], float], limit: float) -> Stages | None:
        runs = interleave(self._seconds(candidate), candidate.num_stages, bound, limit)
        return runs and self._over_model(runs)

    def _step_bound(self, candidate: Candidate, cost: DeviceCost) -> Callable[[Stages], float]:
        """Seconds of a step that begins with these stages: the rest as even as can be, and updated for free."""
        seconds, stages_per_rank, size = self._seconds(candidate), candidate.stages_per_rank, candidate.pipeline_size
        so_far, left = self._so_far(candidate, cost), list(accumulate(reversed(seconds), initial=0.0))

        def bound(runs: Stages) -> float:
            stages, devices, update_s = so_far(runs)
            if len(runs) == candidate.num_stages:
                return pipeline_makespan(stages, candidate.num_microbatches, stages_per_rank) + update_s
            total = sum(stages) + left[len(seconds) - runs[-1][1] - 1]
            busiest = max(total / size, *devices)
            return candidate.num_microbatches * busiest + (total - busiest) / stages_per_rank + update_s

        return bound

    def _so_far(self, candidate: Candidate, cost: DeviceCost) -> Callable[[Stages], SoFar]:
        """Adds a stage to what is known of those below it."""
        run_seconds, boundaries, size = (
            PrefixSums(self._seconds(candidate)),
            self._boundary_seconds(candidate),
            candidate.pipeline_size,
        )

        @cache
        def so_far(runs: Stages) -> SoFar:
            if not runs:
                return (), (0.0,) * size, 0.0
            stages, devices, update_s = so_far(runs[:-1])
            stage, device = len(stages), len(stages) % size
            first, last = runs[-1]
            stage_s = run_seconds(first, last) + boundaries[stage][last]
            devices = (*devices[:device], devices[device] + stage_s, *devices[device + 1 :])
            return (*stages, stage_s), devices, max(update_s, cost(device, self._over_model(runs[device::size])))

        return so_far

    def _update_seconds_within_budget(self, candidate: Candidate) -> DeviceCost:
        """Seconds of a device's all-reduce and optimizer; infinite where its layers do not fit."""
        links = allreduce_links(
            self.cluster, candidate.pipeline_size, candidate.num_replicas, candidate.replicas_adjacent
        )
        updates = UpdateCosts(self.profile, self.num_frozen, candidate.num_replicas, links)
        device_bytes, budget_bytes = self._device_bytes(candidate), self.cluster.device_memory_bytes

        def cost(device: int, runs: Stages) -> float:
            if budget_bytes is not None and device_bytes(device, runs) > budget_bytes:
                return inf
            return updates.seconds(device, runs)

        return cost

    def _device_bytes(self, candidate: Candidate) -> DeviceCost:
        memory, num_microbatches = self.memory[candidate.recompute], candidate.num_microbatches
        moments = [
            in_flight(candidate.schedule, device, candidate.pipeline_size, candidate.stages_per_rank, num_microbatches)
            for device in range(candidate.pipeline_size)
        ]

        def cost(device: int, runs: Stages) -> float:
            return memory.bytes(runs, candidate.num_samples, num_microbatches, moments[device], candidate.num_replicas)

        return cost

    def _seconds(self, candidate: Candidate) -> list[float]:
        return [time.at(candidate.num_samples) for time in self.times[candidate.recompute]]

    def _boundary_seconds(self, candidate: Candidate) -> list[list[float]]:
        """What a stage takes besides its layers, by its last one; a row for each stage."""
        links = boundary_links(
            self.cluster, candidate.pipeline_size, candidate.num_replicas, candidate.replicas_adjacent
        )
        schedule_overhead_s = schedule_overhead_seconds(self.profile, candidate.num_stages)
        rows = {
            link: [schedule_overhead_s + own for own in self._boundary_row(link, candidate.num_samples)]
            for link in set(links)
        }
        return [rows[link] for link in links] * candidate.stages_per_rank

    def _boundary_row(self, link: Link, num_samples: int) -> list[float]:
        return [boundary_seconds(self.profile, link, layer, self.num_frozen, num_samples) for layer in self.layers]

    def _over_model(self, runs: Stages) -> Stages:
        """With layers counted over the whole model."""
        offset = self.layers.start
        return tuple((first + offset, last + offset) for first, last in runs)

    def _plan(self, candidate: Candidate, stages: Stages) -> Plan:
        plan = Plan(
            num_frozen=self.num_frozen,
            cache_level=self.cache_level,
            stages=stages,
            num_replicas=candidate.num_replicas,
            num_microbatches=candidate.num_microbatches,
            schedule=candidate.schedule,
            stages_per_rank=candidate.stages_per_rank,
            recompute=candidate.recompute,
            replicas_adjacent=candidate.replicas_adjacent,
        )
        return replace(plan, predicted_step_s=step_seconds(self.profile, self.cluster, plan, self.batch_size))


def _largest(candidate: Candidate, cost: DeviceCost, stages: Stages) -> float:
    """The cost of the most expensive device that has stages yet."""
    size = candidate.pipeline_size
    return max(cost(device, stages[device::size]) for device in range(min(size, len(stages))))

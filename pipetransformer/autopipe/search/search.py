"""The fastest feasible plan: bounds put the candidates in order and spare most of them their exact partition."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import ceil, floor, inf, log10

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.constraints import UNCONSTRAINED, PlanConstraints, check_constraints
from pipetransformer.autopipe.cost import Profile
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.search.bounds import LowerBounds
from pipetransformer.autopipe.search.candidates import (
    Candidate,
    DeviceLayout,
    candidates,
    device_layouts,
    smallest_candidates,
)
from pipetransformer.autopipe.search.solver import RELATIVE_TOLERANCE, PartitionSolver
from pipetransformer.errors import InfeasiblePlan


def best_plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    num_frozen: int = 0,
    cache_level: int = 0,
    constraints: PlanConstraints = UNCONSTRAINED,
) -> Plan:
    """The fastest plan by :func:`~pipetransformer.autopipe.cost.step_seconds` that fits the memory of the devices.

    Considers every number of devices in a pipeline and of replicas; 1, 2, 3, 4, 6, 8, 12, ... micro-batches; one to
    four stages on a device; activation checkpointing where memory is limited; replicas side by side where there are
    nodes; and for each of these all partitions worth it, from the fastest slowest stage to the fastest slowest update.
    That is exact where all layers hand over equally much; below the frozen prefix, where no gradient comes back, it may
    miss the optimum by a transfer, and with several stages on a device where
    :func:`~pipetransformer.autopipe.search.interleave.interleave` gives up.
    Of equally fast plans (to rounding) it takes the
    simplest: without checkpointing, with fewer chunks, fewer stages, then fewer micro-batches, then fewer replicas.
    Every rank finds the same one, and devices stay idle where they do not help.

    Raises:
        InfeasiblePlan: Nothing fits the memory, or the pins cannot be met.
    """
    search = _Search(profile, cluster, batch_size, num_frozen, cache_level, constraints)
    check_constraints(constraints, search.solver.layers, cluster.num_devices, batch_size)
    return search.fastest() or search.fail()


class _Search:
    """The candidates for one frozen prefix and cache level."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        batch_size: int,
        num_frozen: int,
        cache_level: int,
        constraints: PlanConstraints,
    ) -> None:
        self.cluster, self.batch_size, self.constraints = cluster, batch_size, constraints
        self.solver = PartitionSolver(profile, cluster, batch_size, num_frozen, cache_level, constraints.stages)
        self.bounds = LowerBounds(self.solver)

    def fastest(self) -> Plan | None:
        """Goes through the candidates in the order of their bounds, until none can be better than the best plan."""
        best: tuple[Candidate, Plan] | None = None
        for pipelines_s, pipelines in self._pipelines():
            if best and pipelines_s * RELATIVE_TOLERANCE >= best[1].predicted_step_s:
                break
            update_s = self.bounds.update_seconds(pipelines)
            for candidate_s, candidate in self._candidates(pipelines, update_s):
                limit_s = _limit(candidate, best)
                if candidate_s >= limit_s or self.bounds.frozen_below_seconds(candidate) >= limit_s:
                    continue
                if plan := self.solver.fastest(candidate, limit_s, update_s):
                    best = candidate, plan
        return best[1] if best else None

    def _pipelines(self) -> Iterator[tuple[float, DeviceLayout]]:
        """Those that may fit the memory, in the order of their bounds, which only those at the front get."""
        budget = self.cluster.device_memory_bytes
        waiting = [
            (self.bounds.work_seconds(pipelines), False, pipelines)
            for pipelines in self._all_pipelines()
            if budget is None or self.bounds.least_bytes(pipelines.pipeline_size) <= budget
        ]
        heapify(waiting)
        while waiting:
            least_s, is_bound, pipelines = heappop(waiting)
            if is_bound:
                yield least_s, pipelines
            else:
                heappush(waiting, (self.bounds.pipelines_seconds(pipelines), True, pipelines))

    def _all_pipelines(self) -> Iterator[DeviceLayout]:
        return device_layouts(self.cluster, len(self.solver.layers), self.batch_size, self.constraints)

    def _candidates(self, pipelines: DeviceLayout, update_s: float) -> list[tuple[float, Candidate]]:
        """Those of some pipelines that may fit the memory."""
        budget = self.cluster.device_memory_bytes
        limited = budget is not None
        every = candidates(pipelines, len(self.solver.layers), self.batch_size, self.constraints, may_recompute=limited)
        return sorted(
            (self.bounds.pipeline_makespan(candidate) + update_s, candidate)
            for candidate in every
            if budget is None or self.bounds.device_bytes(candidate) <= budget
        )

    def fail(self) -> Plan:
        """Raises InfeasiblePlan with what to do: the smallest budget with which something would fit."""
        smallest, min_memory = inf, None
        every = smallest_candidates(self.cluster, len(self.solver.layers), self.batch_size, self.constraints)
        for least, candidate in sorted((self.bounds.device_bytes(candidate), candidate) for candidate in every):
            if least >= smallest:
                break
            if num_bytes := self.solver.min_memory(candidate, smallest):
                smallest, min_memory = num_bytes, candidate
        raise InfeasiblePlan(self._explain_memory(smallest, min_memory) if min_memory else self._explain_constraints())

    def _explain_memory(self, smallest: float, min_memory: Candidate) -> str:
        others = ", activation checkpointing" * min_memory.recompute
        return (
            f"no plan fits `device_memory_gib`={(self.cluster.device_memory_bytes or 0) / 2**30:.4g}: it takes "
            f"at least {gib_upwards(smallest):.4g} GiB per device (with {min_memory.num_stages} stages, "
            f"{min_memory.num_replicas} replicas{others} and {min_memory.num_microbatches} micro-batches) at "
            f"`batch_size`={self.batch_size}; raise `device_memory_gib` or `num_devices`, or lower "
            "`batch_size`"
        )

    def _explain_constraints(self) -> str:
        constraints = {name: value for name, value in vars(self.constraints).items() if value is not None}
        return (
            f"nothing on {self.cluster.num_devices} devices with `batch_size`={self.batch_size} is at once "
            + ", ".join(f"`{name}`={value}" for name, value in constraints.items())
            + "; `schedule`=interleaved1f1b (and `stages_per_rank` above 1) needs "
            "`num_microbatches` that `num_microbatches` // devices of a pipeline divides: take a multiple of the "
            "devices, or drop one"
        )


def _limit(candidate: Candidate, best: tuple[Candidate, Plan] | None) -> float:
    """What a candidate must stay below: the best plan, which wins where both are the same, if it is the simpler one."""
    if best is None:
        return inf
    best_candidate, plan = best
    return (
        plan.predicted_step_s * RELATIVE_TOLERANCE
        if best_candidate < candidate
        else plan.predicted_step_s / RELATIVE_TOLERANCE
    )


def gib_upwards(num_bytes: float) -> float:
    """GiB with four digits that are enough for the bytes."""
    unit = 10.0 ** (floor(log10(num_bytes / 2**30)) - 3)
    return ceil(num_bytes / 2**30 / unit) * unit

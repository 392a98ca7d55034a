"""The fastest feasible plan: bounds put the layouts in order and spare most of them their exact partition.

:func:`best_plan` does not consider sharded layers: a transition to any other plan would have to all-gather them. They
are a static layout that a user asks for, and :func:`fsdp_plan` searches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import ceil, floor, inf, log10

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.constraints import UNCONSTRAINED, PlanConstraints, check_constraints
from pipetransformer.autopipe.cost import StepScale, step_scale, step_seconds
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.meshes import mesh_batch_size, on_mesh
from pipetransformer.autopipe.plan import DeviceLayout, Layout, Plan, layer_above
from pipetransformer.autopipe.profile import Profile
from pipetransformer.autopipe.search.bounds import LowerBounds
from pipetransformer.autopipe.search.candidates import (
    candidates,
    device_layouts,
    microbatch_counts,
    preference,
    smallest_candidates,
)
from pipetransformer.autopipe.search.solver import RELATIVE_TOLERANCE, PartitionSolver
from pipetransformer.errors import InfeasiblePlan, TooLargePlan, UserError
from pipetransformer.mesh import SINGLE, StageMesh


def best_plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    num_frozen: int = 0,
    cache_level: int = 0,
    constraints: PlanConstraints = UNCONSTRAINED,
) -> Plan:
    """Returns the fastest plan by :func:`~pipetransformer.autopipe.cost.step_seconds` that fits the devices' memory.

    Considers every number of devices in a pipeline and of replicas; 1, 2, 3, 4, 6, 8, 12, ... micro-batches; one to
    four stages per rank; recomputing where memory is limited; GPipe beside 1F1B where it is faster; both rank orders
    where there are nodes; and for each of these all partitions worth it, from the fastest slowest stage to the fastest
    slowest update.
    That is exact where the outputs of all layers are equally large. Below the frozen prefix, where no gradient comes
    back, it may miss the optimum by a transfer, and with several stages per rank where
    :func:`~pipetransformer.autopipe.search.partition.interleave` gives up.
    Of equally fast plans (to rounding) it takes the simplest by
    :func:`~pipetransformer.autopipe.search.candidates.preference`.
    Every rank finds the same one, and devices stay idle where they do not help.

    All of this on each mesh that the constraints allow, with the seconds of the best plan so far as the limit; ties go
    to the mesh that comes first.

    Args:
        batch_size: Samples of the global batch.
        num_frozen: Blocks that take no gradient.
        cache_level: Blocks whose output is read from the cache.

    Raises:
        InfeasiblePlan: Nothing fits the memory, or the constraints cannot be met.
        UserError: ``num_frozen`` is no number of the blocks, or ``cache_level`` none of the frozen ones.
    """
    _check_frozen(profile, num_frozen, cache_level)
    best: Plan | None = None
    refusal: InfeasiblePlan | None = None
    for mesh in constraints.meshes:
        try:
            search = _search_on(mesh, profile, cluster, batch_size, num_frozen, cache_level, constraints)
            found = search.fastest(inf if best is None else best.predicted_step_s * RELATIVE_TOLERANCE)
            if found is None and best is None:
                search.fail()
        except InfeasiblePlan as error:
            refusal = refusal or _on(mesh, error)
            continue
        best = best if found is None else replace(found, mesh=mesh)
    if best is None:
        assert refusal is not None, "there is a mesh"
        raise refusal
    return best


def _check_frozen(profile: Profile, num_frozen: int, cache_level: int) -> None:
    """Refuses a frozen prefix that the model does not have, and a cache above it."""
    num_blocks = len(profile.layers) - 2
    if not 0 <= num_frozen <= num_blocks:
        raise UserError(f"`num_frozen`={num_frozen} is none of 0 to {num_blocks}, the blocks of the profile")
    if not 0 <= cache_level <= num_frozen:
        raise UserError(
            f"`cache_level`={cache_level} is none of 0 to {num_frozen}: frozen blocks alone are cached; lower it "
            "or raise `num_frozen`"
        )


def _search_on(
    mesh: StageMesh, profile: Profile, cluster: Cluster, batch_size: int, num_frozen: int, cache_level: int,
    constraints: PlanConstraints,
) -> _Search:  # fmt: skip
    """Returns the search among the plans on a mesh; its plans are of the devices that the mesh makes."""
    if mesh != SINGLE:
        profile, cluster = on_mesh(profile, cluster, mesh)
        batch_size = mesh_batch_size(batch_size, mesh)
    solver = PartitionSolver(profile, cluster, batch_size, num_frozen, cache_level, constraints.stages)
    check_constraints(constraints, solver.layers, cluster.num_devices, batch_size)
    return _Search(solver, constraints)


class _Search:
    """The layouts for the frozen prefix and cache level of a solver."""

    def __init__(self, solver: PartitionSolver, constraints: PlanConstraints) -> None:
        self.solver, self.bounds, self.constraints = solver, LowerBounds(solver), constraints
        self.cluster, self.batch_size = solver.cluster, solver.batch_size

    def fastest(self, most_s: float = inf) -> Plan | None:
        """Goes through the layouts in the order of their bounds, until none can be better than the best plan.

        Args:
            most_s: Only a faster plan counts.
        """
        best: Plan | None = None
        for devices_s, devices in self._devices():
            known_s = best.predicted_step_s if best else most_s
            if devices_s * RELATIVE_TOLERANCE >= known_s:
                break
            update_s, scale = self.bounds.update_seconds(devices), self._scale(devices)
            for layout_s, layout in self._layouts(devices, update_s, scale.busy_seconds(known_s / RELATIVE_TOLERANCE)):
                limit_s = scale.busy_seconds(_limit(layout, best) if best else most_s)
                if layout_s >= limit_s or self.bounds.frozen_below_seconds(layout) >= limit_s:
                    continue
                if found := self.solver.fastest(layout, limit_s, update_s):
                    best = replace(found, predicted_step_s=scale.seconds(found.predicted_step_s))
        return best

    def _scale(self, devices: DeviceLayout) -> StepScale:
        solver = self.solver
        return step_scale(solver.profile, self.cluster, devices, solver.cache_level, self.batch_size)

    def _devices(self) -> Iterator[tuple[float, DeviceLayout]]:
        """Yields the grids that may fit the memory, in the order of their bounds.

        Only those at the front of the queue get the dear bound.
        """
        budget = self.cluster.device_memory_bytes
        waiting = [
            (self._scale(devices).seconds(self.bounds.work_seconds(devices)), False, devices)
            for devices in device_layouts(self.cluster, len(self.solver.layers), self.batch_size, self.constraints)
            if budget is None or self.bounds.least_bytes(devices.pipeline_size) <= budget
        ]
        heapify(waiting)
        while waiting:
            least_s, is_final, devices = heappop(waiting)
            if is_final:
                yield least_s, devices
            else:
                counts = microbatch_counts(self.batch_size, devices, self.constraints.num_microbatches)
                most = self.constraints.most_stages_per_rank
                bound_s = self._scale(devices).seconds(self.bounds.devices_seconds(devices, counts, most))
                heappush(waiting, (bound_s, True, devices))

    def _layouts(self, devices: DeviceLayout, update_s: float, most_s: float) -> list[tuple[float, Layout]]:
        """Returns the layouts of a grid that may fit the memory, each with its bound, in the order of the bounds.

        The bounds are of pipeline and update, which all have one scale; only those below ``most_s`` count.
        """
        budget = self.cluster.device_memory_bytes
        limited = budget is not None
        profile, num_layers = self.solver.profile, len(self.solver.layers)
        gpipe_is_faster = profile.overhead_s("gpipe") < profile.overhead_s("1f1b")
        every = candidates(devices, num_layers, self.batch_size, self.constraints, limited, gpipe_is_faster)
        bounded = [
            (bound_s, layout)
            for layout in every
            if (bound_s := self.bounds.pipeline_makespan(layout) + update_s) < most_s
            and (budget is None or self.bounds.device_bytes(layout) <= budget)
        ]
        return sorted(bounded, key=lambda pair: (pair[0], preference(pair[1])))

    def fail(self) -> Plan:
        """Raises InfeasiblePlan with the remedy: the smallest budget with which something would fit."""
        smallest, min_memory = inf, None
        every = smallest_candidates(self.cluster, len(self.solver.layers), self.batch_size, self.constraints)
        bounded = [(self.bounds.device_bytes(layout), layout) for layout in every]
        for least, layout in sorted(bounded, key=lambda pair: (pair[0], preference(pair[1]))):
            if least >= smallest:
                break
            if num_bytes := self.solver.min_memory(layout, smallest):
                smallest, min_memory = num_bytes, layout
        if min_memory:
            raise TooLargePlan(self._explain_memory(smallest, min_memory))
        raise InfeasiblePlan(self._explain_constraints())

    def _explain_memory(self, smallest: float, min_memory: Layout) -> str:
        others = ", activation checkpointing" * min_memory.recompute
        return (
            f"no plan fits `device_memory_gib`={(self.cluster.device_memory_bytes or 0) / 2**30:.4g}: it takes "
            f"at least {gib_upwards(smallest):.4g} GiB per device (with `num_stages`={min_memory.num_stages}, "
            f"`num_replicas`={min_memory.num_replicas}{others} and "
            f"`num_microbatches`={min_memory.num_microbatches}) at `batch_size`={self.batch_size}; "
            f"raise `device_memory_gib` or `num_devices`, or lower `batch_size`{self._accumulation_remedy()}"
        )

    def _accumulation_remedy(self) -> str:
        if self.constraints.num_microbatches is None:
            return ""  # every number has been tried
        return ", or leave `num_microbatches` out, so that gradients are accumulated over more micro-batches"

    def _explain_constraints(self) -> str:
        every = vars(self.constraints).items()
        constraints = {name: value for name, value in every if value is not None and name != "meshes"}
        return (
            f"nothing on {self.cluster.num_devices} devices with `batch_size`={self.batch_size} is at once "
            + ", ".join(f"`{name}`={value}" for name, value in constraints.items())
            + "; `schedule`=interleaved1f1b (and `stages_per_rank` above 1) needs "
            "`num_microbatches` that `num_microbatches` // devices of a pipeline divides: take a multiple of the "
            "devices, or drop one"
        )


def _on(mesh: StageMesh, error: InfeasiblePlan) -> InfeasiblePlan:
    """Returns a refusal that says what its batch is, where the ranks of a mesh have the rows of one in parts."""
    if mesh.batch_ways == 1:
        return error
    note = f"with {mesh}, which counts as one device, `batch_size` is that of the run over {mesh.batch_ways}"
    return type(error)(f"{error.message} ({note})")


def _limit(layout: Layout, best: Plan) -> float:
    """Returns the seconds to stay below: the best plan's, which wins a tie to rounding if it is the simpler one."""
    best_is_simpler = preference(best) < preference(layout)
    tolerance = RELATIVE_TOLERANCE if best_is_simpler else 1 / RELATIVE_TOLERANCE
    return best.predicted_step_s * tolerance


def fsdp_plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    num_frozen: int = 0,
    cache_level: int = 0,
    constraints: PlanConstraints = UNCONSTRAINED,
) -> Plan:
    """Returns the fastest plan that shards every layer over all devices, with the arguments of :func:`best_plan`.

    Only the number of micro-batches and recomputing are left to choose. Ties go to the plan without recomputing, then
    to the one with fewer micro-batches.

    Raises:
        InfeasiblePlan: No such plan fits the memory, or there are more devices than samples in the batch.
    """
    constraints = replace(constraints, num_stages=1, num_replicas=cluster.num_devices, stages_per_rank=1)
    layers = range(layer_above(cache_level), len(profile.layers))
    check_constraints(constraints, layers, cluster.num_devices, batch_size)
    whole = Plan(num_frozen, cache_level, ((layers[0], layers[-1]),), cluster.num_devices, 1, fsdp=True)
    budget = cluster.device_memory_bytes
    plans = list(_fsdp_plans(profile, cluster, batch_size, whole, constraints))
    sizes = [max(device_memory_bytes(profile, plan, batch_size)) for plan in plans]
    fitting = [plan for plan, size in zip(plans, sizes, strict=True) if budget is None or size <= budget]
    if not fitting:
        min_memory, smallest = min(zip(plans, sizes, strict=True), key=lambda pair: pair[1])
        raise InfeasiblePlan(_explain_fsdp(min_memory, smallest, budget or 0, batch_size))
    return min(fitting, key=lambda plan: plan.predicted_step_s)


def _fsdp_plans(
    profile: Profile, cluster: Cluster, batch_size: int, whole: Plan, constraints: PlanConstraints
) -> Iterator[Plan]:
    """Yields all plans, simplest first, from one with a single micro-batch; only limited memory asks to recompute."""
    limited = cluster.device_memory_bytes is not None
    layouts = candidates(whole.devices, whole.num_layers, batch_size, constraints, may_recompute=limited)
    for layout in sorted(layouts, key=preference):
        plan = replace(whole, num_microbatches=layout.num_microbatches, recompute=layout.recompute)
        yield replace(plan, predicted_step_s=step_seconds(profile, cluster, plan, batch_size))


def _explain_fsdp(min_memory: Plan, smallest: int, budget: int, batch_size: int) -> str:
    others = ", activation checkpointing" * min_memory.recompute
    return (
        f"a sharded plan does not fit `device_memory_gib`={budget / 2**30:.4g}: it takes at least "
        f"{gib_upwards(smallest):.4g} GiB on each of {min_memory.num_replicas} devices (with "
        f"`num_microbatches`={min_memory.num_microbatches}{others}) at `batch_size`={batch_size}; raise "
        "`device_memory_gib` or `num_devices`, or lower `batch_size`"
    )


def gib_upwards(num_bytes: float) -> float:
    """Returns GiB, rounded up to four digits so that they are enough for the bytes."""
    unit = 10.0 ** (floor(log10(num_bytes / 2**30)) - 3)
    return ceil(num_bytes / 2**30 / unit) * unit

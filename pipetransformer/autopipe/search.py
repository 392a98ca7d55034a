"""The fastest feasible plan: bounds put the candidates in order and spare most of them their exact partition."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import ceil, floor, inf, log10

from pipetransformer.autopipe.arrange import SAME, Arranger
from pipetransformer.autopipe.bounds import Bounds
from pipetransformer.autopipe.candidates import Grid, Pipelines, all_pipelines, grids, lean_grids
from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.cost import Profile
from pipetransformer.autopipe.pins import FREE, NoPlan, Pins, check_pins
from pipetransformer.autopipe.plan import Plan


def best_plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    num_frozen: int = 0,
    cache_level: int = 0,
    pins: Pins = FREE,
) -> Plan:
    """The fastest plan by :func:`~pipetransformer.autopipe.cost.step_seconds` that fits the memory of the devices.

    Considers every number of devices in a pipeline and of replicas; 1, 2, 3, 4, 6, 8, 12, ... micro-batches; one to
    four stages on a device; activation checkpointing where memory is limited; replicas side by side where there are
    nodes; and for each of these all partitions worth it, from the fastest slowest stage to the fastest slowest update.
    That is exact where all layers hand over equally much; below the frozen prefix, where no gradient comes back, it may
    miss the optimum by a transfer, and with several stages on a device where
    :func:`~pipetransformer.autopipe.interleave.interleave` gives up. Of equally fast plans (to rounding) it takes the
    simplest: without checkpointing, with fewer chunks, fewer stages, then fewer micro-batches, then fewer replicas.
    Every rank finds the same one, and devices stay idle where they do not help.

    Raises:
        NoPlan: Nothing fits the memory, or the pins cannot be met.
    """
    search = _Search(profile, cluster, batch_size, num_frozen, cache_level, pins)
    check_pins(pins, search.arranger.layers, cluster.num_devices, batch_size)
    return search.fastest() or search.fail()


class _Search:
    """The candidates for one frozen prefix and cache level."""

    def __init__(
        self, profile: Profile, cluster: Cluster, batch_size: int, num_frozen: int, cache_level: int, pins: Pins
    ) -> None:
        self.cluster, self.batch_size, self.pins = cluster, batch_size, pins
        self.arranger = Arranger(profile, cluster, batch_size, num_frozen, cache_level, pins.stages)
        self.bounds = Bounds(self.arranger)

    def fastest(self) -> Plan | None:
        """Goes through the candidates in the order of their bounds, until none can be better than the best plan."""
        best: tuple[Grid, Plan] | None = None
        for pipelines_s, pipelines in self._pipelines():
            if best and pipelines_s * SAME >= best[1].predicted_step_s:
                break
            update_s = self.bounds.update_seconds(pipelines)
            for grid_s, grid in self._grids(pipelines, update_s):
                limit_s = _limit(grid, best)
                if grid_s >= limit_s or self.bounds.frozen_below_seconds(grid) >= limit_s:
                    continue
                if plan := self.arranger.fastest(grid, limit_s, update_s):
                    best = grid, plan
        return best[1] if best else None

    def _pipelines(self) -> Iterator[tuple[float, Pipelines]]:
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

    def _all_pipelines(self) -> Iterator[Pipelines]:
        return all_pipelines(self.cluster, len(self.arranger.layers), self.batch_size, self.pins)

    def _grids(self, pipelines: Pipelines, update_s: float) -> list[tuple[float, Grid]]:
        """Those of some pipelines that may fit the memory."""
        budget = self.cluster.device_memory_bytes
        limited = budget is not None
        every = grids(pipelines, len(self.arranger.layers), self.batch_size, self.pins, may_checkpoint=limited)
        return sorted(
            (self.bounds.pipeline_seconds(grid) + update_s, grid)
            for grid in every
            if budget is None or self.bounds.device_bytes(grid) <= budget
        )

    def fail(self) -> Plan:
        """Raises NoPlan with what to do: the smallest budget with which something would fit."""
        smallest, leanest = inf, None
        every = lean_grids(self.cluster, len(self.arranger.layers), self.batch_size, self.pins)
        for least, grid in sorted((self.bounds.device_bytes(grid), grid) for grid in every):
            if least >= smallest:
                break
            if num_bytes := self.arranger.leanest(grid, smallest):
                smallest, leanest = num_bytes, grid
        raise NoPlan(self._explain_memory(smallest, leanest) if leanest else self._explain_pins())

    def _explain_memory(self, smallest: float, leanest: Grid) -> str:
        others = ", activation checkpointing" * leanest.checkpoint
        return (
            f"no plan fits parallel.device_memory_gib={(self.cluster.device_memory_bytes or 0) / 2**30:.4g}: it takes "
            f"at least {gib_upwards(smallest):.4g} GiB per device (with {leanest.num_stages} stages, "
            f"{leanest.num_replicas} replicas{others} and {leanest.num_microbatches} micro-batches) at "
            f"batch_size={self.batch_size}; raise parallel.device_memory_gib or parallel.world_size, or lower "
            "batch_size"
        )

    def _explain_pins(self) -> str:
        pins = {name: value for name, value in vars(self.pins).items() if value is not None}
        return (
            f"nothing on {self.cluster.num_devices} devices with batch_size={self.batch_size} is at once "
            + ", ".join(f"parallel.{name}={value}" for name, value in pins.items())
            + "; parallel.schedule=interleaved1f1b (and parallel.num_chunks above 1) needs parallel.num_microbatches "
            "that num_microbatches // devices of a pipeline divides: take a multiple of the devices, or drop one"
        )


def _limit(grid: Grid, best: tuple[Grid, Plan] | None) -> float:
    """What a candidate must stay below: the best plan, which wins where both are the same, if it is the simpler one."""
    if best is None:
        return inf
    best_grid, plan = best
    return plan.predicted_step_s * SAME if best_grid < grid else plan.predicted_step_s / SAME


def gib_upwards(num_bytes: float) -> float:
    """GiB with four digits that are enough for the bytes."""
    unit = 10.0 ** (floor(log10(num_bytes / 2**30)) - 3)
    return ceil(num_bytes / 2**30 / unit) * unit

"""Asks AutoPipe for plans, within what the user fixed."""

from dataclasses import replace
from functools import cached_property

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.cost import Profile, step_seconds
from pipetransformer.autopipe.limit import plan_efficiency, spread_overhead
from pipetransformer.autopipe.pins import Pins
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.search import best_plan
from pipetransformer.config import Parallel


class Planner:
    """The plans of one run; pure, so that every rank finds the same.

    Args:
        parallel: What the user fixed.
        batch_size: Global batch.
    """

    def __init__(self, profile: Profile, cluster: Cluster, parallel: Parallel, batch_size: int) -> None:
        self.profile, self.cluster = profile, cluster
        self._parallel, self._batch_size = parallel, batch_size
        num_stages, num_replicas = {
            "elastic": (parallel.num_stages, parallel.num_replicas),
            "data": (1, cluster.num_devices),
            "pipeline": (cluster.num_devices * (parallel.num_chunks or 1), 1),
            "single": (1, 1),
        }[parallel.arrangement]
        self._pins = Pins(
            num_stages=num_stages,
            num_replicas=num_replicas,
            num_microbatches=parallel.num_microbatches,
            schedule=parallel.schedule,
            checkpoint=parallel.checkpoint,
            num_chunks=parallel.num_chunks,
        )

    def initial(self) -> Plan:
        return best_plan(self.profile, self.cluster, self._batch_size, pins=self._pins)

    def static(self) -> Plan:
        """The best plan that never freezes, with no more fixed than by default: what the run is compared with."""
        return self._static

    @cached_property
    def _static(self) -> Plan:
        pins = Pins(num_chunks=1 if self._parallel.num_chunks == 1 else None)
        return best_plan(self.profile, self.cluster, self._batch_size, pins=pins)

    def next(self, plan: Plan, num_frozen: int, cache_level: int) -> Plan:
        """The plan for a longer frozen prefix."""
        if not self._parallel.autopipe:
            frozen = replace(plan, num_frozen=num_frozen, cache_level=cache_level)
            return replace(frozen, predicted_step_s=self.predict(frozen))
        pins = self._pins if self._parallel.autodp else replace(self._pins, num_replicas=plan.num_replicas)
        num_layers = plan.num_layers - (cache_level + 1 if cache_level else 0)
        # the frozen prefix may leave fewer layers than stages were asked for
        if pins.num_stages is not None and pins.num_stages > num_layers:
            pins = replace(pins, num_stages=num_layers, num_chunks=pins.num_chunks and 1)
        if pins.num_chunks is not None and pins.num_stages is None and 2 * pins.num_chunks > num_layers:
            pins = replace(pins, num_chunks=1)
        return best_plan(self.profile, self.cluster, self._batch_size, num_frozen, cache_level, pins)

    def ideal(self) -> Profile:
        """The profile that the physical limit counts with: a device works on its whole share of the batch at once."""
        return spread_overhead(self.profile, -(-self._batch_size // self.cluster.num_devices))

    def efficiency(self, plan: Plan) -> float:
        """Share of the devices' time that a plan spends on ideal work."""
        return plan_efficiency(self.profile, plan, self._batch_size)

    def predict(self, plan: Plan) -> float:
        """Seconds of one optimizer step."""
        return step_seconds(self.profile, self.cluster, plan, self._batch_size)

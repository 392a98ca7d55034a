"""The planner of a run: its first plan, and at each decision the transition that pays most."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from pipetransformer.autodp.transition import (
    Transition,
    choose_transition,
    first_transition,
    next_transition,
    transfer_seconds,
)
from pipetransformer.autopipe.breakdown import StepParts, step_parts
from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.constraints import UNCONSTRAINED, PlanConstraints
from pipetransformer.autopipe.correction import LayoutKind, TimedPlan
from pipetransformer.autopipe.cost import kind_of_plan, step_seconds
from pipetransformer.autopipe.limit import efficiency, fill_seconds, spread_overhead, work_seconds
from pipetransformer.autopipe.plan import Plan, layer_above
from pipetransformer.autopipe.profile import Profile
from pipetransformer.autopipe.search.chunked import chunked_plan
from pipetransformer.autopipe.search.search import best_plan, fsdp_plan
from pipetransformer.config.sections import Parallel
from pipetransformer.errors import InfeasiblePlan
from pipetransformer.mesh import SINGLE, StageMesh


@dataclass(frozen=True)
class RemainingRun:
    """The rest of a run.

    Attributes:
        num_steps: Optimizer steps.
        num_samples: Training samples that a fill of the cache computes.
        overhead_s: Seconds of a transition besides moving layers and filling the cache.
        may_cache: Frozen layers' output can be stored.
        must_cache: No plan is taken that computes the output of a frozen layer.
    """

    num_steps: int
    num_samples: int
    overhead_s: float
    may_cache: bool
    must_cache: bool = False


class Planner:
    """The plans of one run. All ranks find the same: only :meth:`correct` changes anything, and all call it alike.

    Args:
        profile: The measured layers.
        cluster: The devices and their links.
        parallel: Options that the user fixed.
        batch_size: Samples of the global batch.
        parks: Frozen layers keep their optimizer state, and bring it along where they move.
        meshes: Those that a plan may have, the simplest first.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, parallel: Parallel, batch_size: int, parks: bool = False,
        meshes: tuple[StageMesh, ...] = (SINGLE,),
    ) -> None:  # fmt: skip
        self.profile, self.cluster = profile, cluster
        self._parallel, self._batch_size, self._parks = parallel, batch_size, parks
        num_units = max(1, cluster.num_devices // meshes[0].num_ranks)  # a static arrangement has one mesh
        num_stages, num_replicas = {
            "elastic": (parallel.num_stages, parallel.num_replicas),
            "data": (1, num_units),
            "sharded": (1, cluster.num_devices),
            "pipeline": (num_units * (parallel.stages_per_rank or 1), 1),
            "single": (1, 1),
        }[parallel.arrangement]
        if parallel.arrangement == "pipeline":
            _check_pipeline(num_stages or 1, len(profile.layers), num_units)
        self._constraints = PlanConstraints(
            num_stages=num_stages,
            num_replicas=num_replicas,
            num_microbatches=parallel.num_microbatches,
            schedule=parallel.schedule,
            recompute=parallel.recompute,
            stages_per_rank=parallel.stages_per_rank,
            meshes=meshes,
        )

    @cached_property
    def first(self) -> Transition:
        """The transition to the fastest plan with nothing frozen, from the state in which no rank holds a layer."""
        return first_transition(self._best(self._constraints), "fastest plan with nothing frozen")

    def resumed(self, num_frozen: int) -> Transition:
        """Returns the transition to the fastest plan for a frozen prefix, from where no rank holds a layer."""
        plan = self.initial()
        if num_frozen or (self.profile.timed and self._parallel.autopipe):
            plan = self.next(plan, num_frozen, 0) if self._parallel.autopipe else self.keep(plan, num_frozen)
        return first_transition(plan, f"fastest plan with {num_frozen} blocks frozen, of which none is cached yet")

    def initial(self) -> Plan:
        """Returns the fastest plan with nothing frozen, as it was found first."""
        return self.first.after

    def fastest(self) -> Plan:
        """Returns the fastest plan with nothing frozen by all that is known."""
        return self._best(self._constraints)

    def _best(self, constraints: PlanConstraints, num_frozen: int = 0, cache_level: int = 0) -> Plan:
        arguments = num_frozen, cache_level, constraints
        if self._parallel.device_chunk_gib is not None:
            chunk_bytes = int(self._parallel.device_chunk_gib * 2**30)
            return chunked_plan(self.profile, self.cluster, self._batch_size, chunk_bytes, *arguments)
        find = fsdp_plan if self._parallel.arrangement == "sharded" else best_plan
        return find(self.profile, self.cluster, self._batch_size, *arguments)

    @cached_property
    def static(self) -> Plan:
        """The best plan that never freezes, with no more fixed than by default: what the run is compared with.

        Where only a sharded one fits the memory, a run with ``parallel=sharded`` is compared with that; one with chunks
        with the best of them.
        """
        if self._parallel.device_chunk_gib is not None:
            return self._best(UNCONSTRAINED)
        plans, faults = list[Plan](), list[InfeasiblePlan]()
        for constraints, cluster in self._of_static():
            try:
                plans.append(best_plan(self.profile, cluster, self._batch_size, constraints=constraints))
            except InfeasiblePlan as error:
                faults.append(error)
        if plans:
            return min(plans, key=lambda plan: plan.predicted_step_s)
        if self._parallel.arrangement == "sharded":
            return self._best(UNCONSTRAINED)
        raise faults[-1]

    def _of_static(self) -> Iterator[tuple[PlanConstraints, Cluster]]:
        """Yields constraints and devices of the plans that a run is compared with.

        Plain arrangements count beside a pinned mesh. Who pins one may do so since the model fits no device: without a
        budget they have to fit what there is.
        """
        bare = PlanConstraints(stages_per_rank=1 if self._parallel.stages_per_rank == 1 else None)
        if SINGLE not in self._constraints.meshes:
            budget = self.cluster.device_memory_bytes or self.cluster.usable_bytes
            yield replace(bare, meshes=(SINGLE,)), replace(self.cluster, device_memory_bytes=budget)
        yield replace(bare, meshes=self._constraints.meshes), self.cluster

    def transition(self, last: Transition, num_frozen: int, remaining: RemainingRun) -> Transition:
        """Returns the transition for another frozen prefix, from where the last one ended.

        Considers three options: cache all frozen blocks, keep the cache level, keep the stages; and to cache nothing
        once steps have shown what reading takes. Where blocks below the cache level are unfrozen, what is stored is
        void: then the options are to fill the cache from the input up to the frozen prefix, and to cache nothing. Takes
        the one with which the run ends first. Evaluation samples do not count: filling the cache for them takes as long
        as the next evaluation saves.

        Raises:
            InfeasiblePlan: It cannot stay, and nothing else fits.
        """
        plan = last.after
        can_stay = num_frozen >= plan.num_frozen and (remaining.may_cache or plan.cache_level == 0)
        can_stay &= not remaining.must_cache or plan.cache_level == num_frozen
        stay = None
        if can_stay or not self._parallel.autopipe:
            stay = next_transition(last, self.keep(plan, num_frozen))
        plans: list[Plan] = []
        if self._parallel.autopipe:
            levels = self._levels(plan, num_frozen) if remaining.may_cache else {0}
            levels = {num_frozen} if remaining.must_cache else levels
            plans = self._feasible(plan, num_frozen, sorted(levels, reverse=True), can_stay)
        others = (next_transition(last, new) for new in plans if stay is None or new != stay.after)
        options = [self._costed(other, remaining) for other in others]
        return choose_transition(stay, options, remaining.num_steps, _why_invalid(plan, num_frozen, remaining))

    def _levels(self, plan: Plan, num_frozen: int) -> set[int]:
        """Returns the cache levels worth it after a plan: none is worth it only where reading may be slow."""
        levels = {num_frozen, _valid_level(plan, num_frozen)}
        return levels | {0} if any(timed.cache_level for timed in self.profile.timed) else levels

    def _feasible(self, plan: Plan, num_frozen: int, levels: Sequence[int], may_be_none: bool) -> list[Plan]:
        """Returns the fastest plan for each level of the cache, where there is one."""
        plans: list[Plan] = []
        for level in levels:
            try:
                plans.append(self.next(plan, num_frozen, level))
            except InfeasiblePlan:
                if level == levels[-1] and not (plans or may_be_none):
                    raise
        return plans

    def _costed(self, transition: Transition, remaining: RemainingRun) -> Transition:
        """Returns the transition with its cost: moving layers, filling the cache, and the rest as last measured."""
        new = transition.after
        level = _valid_level(transition.before, new.num_frozen) if transition.before else 0
        moves, cluster = transition.moves, self.cluster
        move_s = transfer_seconds(moves, self.profile, cluster, new.num_frozen, self._parks, new.mesh)
        work_s = 0.0
        if new.cache_level > level:
            work_s = fill_seconds(self.without_overhead(), level, new.cache_level, remaining.num_samples)
            work_s *= self.profile.correction(kind_of_plan(new)).factor
            work_s += remaining.num_samples * self.profile.fill_read_s * (level == 0)
        return replace(transition, cost_s=remaining.overhead_s + move_s + work_s / self.cluster.num_devices)

    def keep(self, plan: Plan, num_frozen: int) -> Plan:
        """Returns the plan with the same stages and cache level and another frozen prefix."""
        frozen = replace(plan, num_frozen=num_frozen)
        return replace(frozen, predicted_step_s=self.predict(frozen))

    def next(self, plan: Plan, num_frozen: int, cache_level: int) -> Plan:
        """Returns the fastest plan for another frozen prefix."""
        constraints = self._constraints
        if not self._parallel.autodp:
            constraints = replace(constraints, num_replicas=plan.num_replicas, meshes=(plan.mesh,))
        num_layers = plan.num_layers - layer_above(cache_level)
        # the frozen prefix may leave fewer layers than stages were asked for; the devices stay, as far as it goes
        if constraints.num_stages is not None and constraints.num_stages > num_layers:
            num_stages = min(plan.pipeline_size, num_layers)
            constraints = replace(constraints, num_stages=num_stages, stages_per_rank=constraints.stages_per_rank and 1)
        if (
            constraints.stages_per_rank is not None
            and constraints.num_stages is None
            and 2 * constraints.stages_per_rank > num_layers
        ):
            constraints = replace(constraints, stages_per_rank=1)
        return self._best(constraints, num_frozen, cache_level)

    def without_overhead(self) -> Profile:
        """Returns the profile of the physical limit: a device takes all its samples of the batch at once."""
        return spread_overhead(self.profile, -(-self._batch_size // self.cluster.num_devices))

    def static_efficiency(self) -> float:
        """Returns the fraction of the devices' time that the best static plan spends on ideal work.

        Both by the profile alone: corrections are of steps, and there are none of the work.
        """
        step_s = self._predict_by(self._uncorrected, self.static)
        return min(1.0, efficiency(self.without_overhead(), self._batch_size, self.cluster.num_devices, step_s))

    def step_shares(self) -> tuple[float, ...]:
        """Returns the work of a step with 0 to L blocks frozen over that with none, shape (L + 1,).

        The forward pass of frozen blocks counts, so that a rule decides alike with a cache and without.
        """
        profile = self.without_overhead()
        prefixes = range(len(profile.layers) - 1)  # the head never freezes
        work_s = [work_seconds(profile, num_frozen, 0, 1) for num_frozen in prefixes]
        return tuple(seconds / work_s[0] for seconds in work_s)

    def frozen_step_seconds(self, may_cache: bool) -> tuple[float, ...]:
        """Returns the predicted seconds of a step with 0 to L blocks frozen, shape (L + 1,).

        Args:
            may_cache: The frozen blocks' output may come from the cache.
        """
        first = self.resumed(num_frozen=0).after
        seconds = [self.predict(first)]
        for num_frozen in range(1, len(self.profile.layers) - 1):
            levels = sorted({0, num_frozen * may_cache}, reverse=True)
            if self._parallel.autopipe:
                plans = self._feasible(first, num_frozen, levels, may_be_none=True)
            else:
                plans = [self.keep(first, num_frozen)]
            seconds.append(min((plan.predicted_step_s for plan in plans), default=seconds[-1]))
        return tuple(seconds)

    def predict(self, plan: Plan) -> float:
        """Returns the seconds of one optimizer step."""
        return self._predict_by(self.profile, plan)

    def knows(self, plan: Plan) -> bool:
        """Returns whether the devices can have a plan; one of a resumed run may be of other devices."""
        is_measured = plan.mesh == SINGLE or any(known.mesh == plan.mesh for known in self.profile.meshes)
        return is_measured and plan.num_devices <= self.cluster.num_devices

    def parts(self, plan: Plan) -> StepParts:
        """Returns what the seconds of a step go to, by the profile alone: a correction has no part of its own."""
        return step_parts(self.profile, self.cluster, plan, self._batch_size)

    def _predict_by(self, profile: Profile, plan: Plan) -> float:
        return step_seconds(profile, self.cluster, plan, self._batch_size)

    def correct(self, plan: Plan, measured_s: float) -> float:
        """Corrects later predictions for plans of one kind by a measured step of one of them.

        Args:
            plan: Of the kind.
            measured_s: Seconds of its steps, equal on every rank.

        Returns:
            What was predicted for it.
        """
        predicted_s, kind = self.predict(plan), kind_of_plan(plan)
        uncorrected_s = self._predict_by(self._uncorrected, plan)
        timed = TimedPlan(kind, plan.num_frozen, plan.cache_level, uncorrected_s, measured_s)
        self.profile = self.profile.with_timed(timed)
        self.__dict__.pop("static", None)  # may be another one now
        return predicted_s

    def recall(self, timed: Iterable[tuple[Plan, float]]) -> None:
        """Corrects predictions by what steps took before a run went on; plans of other devices tell nothing.

        Args:
            timed: Plans with their seconds of a step, the oldest first.
        """
        for plan, measured_s in timed:
            if self.knows(plan):
                self.correct(plan, measured_s)

    @property
    def _uncorrected(self) -> Profile:
        return replace(self.profile, timed=())

    def static_candidates(self) -> list[Plan]:
        """Returns the fastest plan with nothing frozen of each kind that the devices can have, the fastest one first.

        One device, replicas of one device, and pipelines, as far as they fit the memory; on a mesh the fastest of all.
        """
        if self._parallel.device_chunk_gib is not None:
            return [self.initial()]
        plans = list[Plan]()
        for constraints, cluster, mesh in ((*each, mesh) for each in self._of_static() for mesh in each[0].meshes):
            num_devices = cluster.num_devices // mesh.num_ranks
            for num_stages in range(1, min(num_devices, len(self.profile.layers)) + 1):
                for num_replicas in {1, max(1, num_devices // num_stages)}:
                    with suppress(InfeasiblePlan):
                        own = replace(constraints, num_stages=num_stages, num_replicas=num_replicas, meshes=(mesh,))
                        plans.append(best_plan(self.profile, cluster, self._batch_size, constraints=own))
        fastest: dict[LayoutKind, Plan] = {}
        for plan in sorted(plans, key=lambda plan: plan.predicted_step_s):
            fastest.setdefault(kind_of_plan(plan), plan)
        return list(fastest.values())


def _check_pipeline(num_stages: int, num_layers: int, num_devices: int) -> None:
    """Refuses a static pipeline with more stages than layers, whose number of stages nobody gave."""
    if num_stages > num_layers:
        raise InfeasiblePlan(
            f"parallel=pipeline has {num_stages} stages on {num_devices} devices, and the model {num_layers} layers; "
            "lower `num_devices`, or take parallel=elastic, which lays several pipelines side by side"
        )


def _valid_level(plan: Plan, num_frozen: int) -> int:
    """Returns the cache level of a plan under another frozen prefix: none where blocks below it train again."""
    return plan.cache_level if plan.cache_level <= num_frozen else 0


def _why_invalid(plan: Plan, num_frozen: int, remaining: RemainingRun) -> str:
    """Returns why a plan does not hold for another frozen prefix."""
    first, last = num_frozen + 1, plan.num_frozen
    if first > last:
        return "cache.require=true has all frozen blocks cached" if remaining.must_cache else "the cache is off"
    again = f"block {last} trains again" if first == last else f"blocks {first} to {last} train again"
    is_void = _valid_level(plan, num_frozen) != plan.cache_level
    return again + f", which voids the stored output of block {plan.cache_level}" * is_void

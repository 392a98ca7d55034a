"""Transitions of a run: asks the planner, fills the cache, moves the layers, and reports."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pipetransformer.autodp.transition import Transition, next_transition
from pipetransformer.autopipe.plan import Plan
from pipetransformer.freeze.base import Decision
from pipetransformer.models.stack import ParamRef
from pipetransformer.planning.history import PlanRecord, plan_dict, same_arrangement
from pipetransformer.planning.planner import Planner, RemainingRun
from pipetransformer.planning.state import TrainState
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import broadcast_from_rank0
from pipetransformer.runtime.result import TransitionReport
from pipetransformer.runtime.snapshot import LayerSource
from pipetransformer.training.cache_session import CacheSession

WORTH_IT = 0.05  # of a step; less is within what steps differ by


class Transitions:
    """Carries out the transitions of a run on one rank. Every rank makes the same calls.

    Args:
        planner: Chooses each transition.
        runtime: Moves the layers and runs the plans.
        cache_session: Fills and reads the cache.
        timeline: Steps of the run.
        state: Receives every plan, and the measured overhead of the last transition.
        report: Receives every transition.
    """

    def __init__(
        self, planner: Planner, runtime: ElasticRuntime, cache_session: CacheSession, timeline: Timeline,
        state: TrainState, report: Reporter,
    ) -> None:  # fmt: skip
        self._planner, self._runtime, self._cache_session = planner, runtime, cache_session
        self._timeline, self._state, self._report = timeline, state, report

    def start(self, first: Transition, source: LayerSource | None = None) -> None:
        """Goes to the first plan.

        Args:
            source: Layers of a checkpoint, from which the run goes on.
        """
        self._apply(first, source)
        self._state.history.plan(self._record(first.after, self._state.step, first.reason))

    def replace(self, plan: Plan, reason: str, load: Callable[[], None], lost_s: float) -> None:
        """Goes to a plan that caches nothing, for a run that goes on from another step.

        Args:
            load: Gives the layers the weights of that step.
            lost_s: Seconds of steps that are trained again.
        """
        start, last = time.perf_counter(), self._runtime.transition
        assert last is not None, "a run has a plan"
        self._cache_session.advance_to(0, self._state.step)  # gives back the layers that it has borrowed, too
        before = replace(last.after, predicted_step_s=self._planner.predict(last.after))
        moved = self._apply(next_transition(last, plan))
        load()
        record = self._record(plan, self._state.step, reason, lost_s + time.perf_counter() - start)
        record.lost_seconds = lost_s
        self._state.history.plan(record)
        self._write(before, record, moved, choice=reason, lost_seconds=lost_s)

    def follow(self, decision: Decision, step: int) -> None:
        """Makes the transition that pays most for a decision, with the cache.

        Args:
            step: Optimizer steps so far.
        """
        start = time.perf_counter()
        remaining, transition = self._choose(decision.num_frozen, step)
        planned = time.perf_counter()
        while not self._cache_session.advance_to(transition.after.cache_level, step):
            remaining, transition = self._choose(decision.num_frozen, step)  # without the cache
        self._carry_out(transition, remaining, decision.reason, step, start, planned)

    def improve(self, step: int, reason: str) -> bool:
        """Makes the transition to a plan that is faster by what has been measured since the last one, if there is one.

        Returns:
            Whether there is one.
        """
        plan = self._runtime.plan
        assert plan is not None, "a plan has been timed"
        _, transition = self._choose(plan.num_frozen, step)
        gains = transition.after.predicted_step_s < (1 - WORTH_IT) * self._planner.predict(plan)
        if same_arrangement(transition.after, plan) or not gains:
            return False
        self.follow(Decision(plan.num_frozen, "measured", reason), step)
        return True

    def try_plan(self, plan: Plan, step: int, reason: str) -> None:
        """Goes to a plan that caches nothing, whether it is faster or not."""
        start, last = time.perf_counter(), self._runtime.transition
        assert last is not None, "a run has a plan"
        remaining = self._remaining(step)
        self._cache_session.advance_to(0, step)
        self._carry_out(next_transition(last, plan), remaining, reason, step, start, time.perf_counter())

    def _carry_out(
        self, transition: Transition, remaining: RemainingRun, reason: str, step: int, start: float, planned: float
    ) -> None:
        """Moves the layers, remembers the plan, and reports.

        Args:
            start, planned: When the transition began, and when the planner had chosen it.
        """
        before, plan = transition.before, transition.after
        assert before is not None, "a run has a plan before its first decision"
        before = replace(before, predicted_step_s=self._planner.predict(before))  # by what is known now
        filled = time.perf_counter()
        moved = self._apply(transition)
        self._cache_session.start_reading(plan.cache_level)
        seconds = time.perf_counter() - start
        record = self._record(plan, step, reason, seconds, remaining.num_samples, transition.reason)
        self._state.history.plan(record)
        self._write(
            before,
            record,
            moved,
            choice=transition.reason,
            plan_seconds=planned - start,
            fill_seconds=filled - planned,
            predicted_gain_s=transition.gain_s,
            predicted_cost_s=transition.cost_s,
            num_steps_left=remaining.num_steps,
        )

    def _write(self, before: Plan, record: PlanRecord, moved: TransitionReport, **more: Any) -> None:
        """Reports a transition from a plan to that of a record."""
        self._report.write(
            "transition",
            step=record.step,
            reason=record.reason,
            before=plan_dict(before),
            after=plan_dict(record.plan),
            seconds=record.transition_seconds,
            group_seconds=moved.group_s,
            move_seconds=moved.move_s,
            rebuild_seconds=moved.rebuild_s,
            num_moves=len(moved.moves),
            moves=moved.moves,
            bytes_moved=moved.bytes_moved,
            predicted_gain=before.predicted_step_s / record.plan.predicted_step_s,
            parks=self._runtime.resident.parks,
            world_size=self._planner.cluster.num_devices,  # a roll-back takes the line of a resume out of the log
            **more,
        )

    def _choose(self, num_frozen: int, step: int) -> tuple[RemainingRun, Transition]:
        """Returns the transition, and the rest of the run by which the planner chose it."""
        last, remaining = self._runtime.transition, self._remaining(step)
        assert last is not None, "a run has a plan before its first decision"
        return remaining, self._planner.transition(last, num_frozen, remaining)

    def _remaining(self, step: int) -> RemainingRun:
        cache = self._cache_session
        return RemainingRun(
            self._timeline.steps_left(step),
            cache.num_samples(step),
            self._state.overhead_s,
            may_cache=cache.is_on,
            must_cache=cache.is_required,
        )

    def _record(
        self, plan: Plan, step: int, reason: str, seconds: float = 0.0, num_samples: int = 0, choice: str = ""
    ) -> PlanRecord:
        cluster, reached = self._planner.cluster, (plan, step, reason, seconds, num_samples, choice)
        return PlanRecord(*reached, num_devices=cluster.num_devices, device_name=cluster.device_name)

    def _apply(self, transition: Transition, source: LayerSource | None = None) -> TransitionReport:
        """Carries out a transition, and remembers the seconds that it takes besides moving layers.

        Ranks that were idle learn the mean norm of the gradient.
        """
        self._warn_of_frozen_ties(transition)
        moved, guard = self._runtime.apply(transition, source), self._state.guard
        own = torch.tensor([moved.overhead_s, guard.mean_norm], dtype=torch.float64)
        self._state.overhead_s, guard.mean_norm = broadcast_from_rank0(own).tolist()
        return moved

    def _warn_of_frozen_ties(self, transition: Transition) -> None:
        """Tells, when the first layers freeze, which weights of active layers freeze with them."""
        before, first_active = transition.before, transition.after.first_active_layer
        if before is not None and before.num_frozen:
            return
        for lowest, *copies in self._runtime.resident.stack.ties:
            if lowest.layer < first_active <= copies[-1].layer:
                self._report.write("warning", message=frozen_tie(lowest, copies[-1]))


def frozen_tie(lowest: ParamRef, highest: ParamRef) -> str:
    """Returns what to say of a weight of several layers of which the lowest freezes."""
    if lowest.name == highest.name:
        return f"{lowest.name}, which layers {lowest.layer} to {highest.layer} have in common, stops training here"
    return (
        f"{highest.name} of layer {highest.layer} is {lowest.name} of layer {lowest.layer}, and stops training with it "
        "here; model.untie=true gives a head a copy of its own, which goes on"
    )

"""Compares the first steps of each plan with the prediction, and goes to another plan where that shows a faster one.

With ``baseline=true`` the run begins with a few steps under the best static plan of each kind. They are steps of the
training like any others, because every arrangement gives the same mathematics; so the comparison costs no step::

    step         0 .. 7          8 .. 15         16 .. 23              24 ..
    plan         1 x 2           2 stages        1 device              the fastest of them
                 [2 warm, 6 timed] each
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipetransformer.autopipe.correction import LayoutKind
from pipetransformer.autopipe.cost import kind_of_plan
from pipetransformer.autopipe.plan import Plan
from pipetransformer.planning.history import NUM_TIMED_STEPS, NUM_WARMUP_STEPS, same_arrangement
from pipetransformer.runtime.groups import broadcast_from_rank0

if TYPE_CHECKING:
    from pipetransformer.training.trainer import Trainer


class PlanTiming:
    """Times the plans of one rank's training loop. Every rank makes the same calls.

    A kind of plan is tried once for a frozen prefix and cache level, so that plans whose times are close do not
    alternate.

    Args:
        trainer: The loop, whose planner learns what is measured.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._timed: set[tuple[LayoutKind, int, int]] = set()
        self._untried: list[Plan] | None = None

    def start(self) -> None:
        """Looks for the static plans with which a run compares itself, if it is asked to; also one that goes on."""
        trainer, freeze = self._trainer, self._trainer.config.freeze
        if trainer.config.baseline and not (trainer.plan.fsdp or trainer.plan.num_frozen or freeze.frozen_at_start):
            untimed = trainer.state.history.untimed(trainer.planner)
            self._untried = [plan for plan in untimed if not same_arrangement(plan, trainer.plan)]
            self._warn_of_decisions(1 + len(self._untried))

    def _warn_of_decisions(self, num_plans: int) -> None:
        """Warns where blocks may freeze before all static plans are timed."""
        trainer, needed = self._trainer, num_plans * (NUM_WARMUP_STEPS + NUM_TIMED_STEPS)
        step, timeline = trainer.state.step, trainer.timeline
        left = timeline.steps_left(step)
        if not trainer.config.freeze.never_freezes:
            left = min(left, timeline.decision_every - step % timeline.decision_every)
        if left < needed:
            trainer.report.write(
                "warning",
                message=f"baseline=true takes {needed} steps for {num_plans} static plans, and times only those that "
                f"come before a block freezes: the next decision, or the end, is {left} steps away; give a larger "
                "freeze.interval=, or more epochs",
            )

    def look(self) -> None:
        """Once the plan in force has been timed, goes to the next static plan, or to a faster plan. Collective."""
        trainer = self._trainer
        if trainer.is_over or not trainer.state.history.is_timed():
            return
        self._correct(trainer.plan)
        if self._untried is not None and not trainer.plan.num_frozen:
            self._try_next(self._untried)
            return
        key = kind_of_plan(trainer.plan), trainer.plan.num_frozen, trainer.plan.cache_level
        if key not in self._timed:
            self._timed.add(key)
            trainer.improve_plan("its first steps have shown that another plan is faster")

    def _correct(self, plan: Plan) -> None:
        """Tells the planner what steps under a plan take, by rank 0's clock, and reports it."""
        trainer = self._trainer
        measured_s = broadcast_from_rank0(trainer.state.history.entries[-1].typical_step_s)
        assert measured_s is not None, "the plan has been timed"
        predicted_s = trainer.planner.correct(plan, measured_s)
        trainer.decisions.heed_times()
        trainer.flush_log()
        trainer.report.write(
            "plan_timed",
            step=trainer.state.step,
            num_stages=plan.num_stages,
            num_replicas=plan.num_replicas,
            mesh=str(plan.mesh),
            num_frozen=plan.num_frozen,
            cache_level=plan.cache_level,
            num_steps=NUM_TIMED_STEPS,
            predicted_step_s=predicted_s,
            measured_step_s=measured_s,
        )

    def _try_next(self, untried: list[Plan]) -> None:
        """Goes to the next static plan; after the last one to the fastest that the options allow."""
        trainer = self._trainer
        if untried:
            trainer.try_plan(untried.pop(0), "baseline: times the best static plan of another kind")
            return
        self._untried, fastest = None, trainer.planner.fastest()
        if not same_arrangement(fastest, trainer.plan):
            trainer.try_plan(
                fastest, "baseline: all static plans are timed; the fastest that the options allow goes on"
            )

"""A run as it is predicted: its plans and times from the first step to the last, as far as its policy can be asked.

There are no gradients yet, so policies are asked with made-up signals under which they freeze as early as they may:
gradient norms that fall from block to block, so that the topmost block always has the smallest one and the paper's rule
is bound by its cap alone, and zero for every other signal, as if nothing changed any more. At the first decision what
compares with the last one is infinite, as it is in a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.plan import Plan
from pipetransformer.errors import InfeasiblePlan
from pipetransformer.freeze.answer import ask
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals
from pipetransformer.planning.history import PlanRecord, RunHistory
from pipetransformer.planning.planner import Planner, RemainingRun
from pipetransformer.planning.target import Target, TargetState
from pipetransformer.planning.timeline import Timeline

REFERENCED = {"weight_change", "feature_change", "plasticity"}
"""Signals that compare with the last decision."""


@dataclass(frozen=True)
class Foresight:
    """A run that is predicted.

    Attributes:
        planner: Of the run, whose plans and times it takes.
        timeline: Its steps.
        policy: Decides what freezes.
        num_blocks: Of the model.
        may_cache: Frozen layers' output can be stored.
        overhead_s: Seconds of a transition besides moving layers and filling the cache.
        rate: Returns the learning rate of a step, given all steps, by which a policy may unfreeze; ``None``: it stays.
        must_cache: The run ends where frozen layers' output cannot be stored.
        num_samples: Returns the training samples that a fill before a step has to get back, each once for every draw
            that is read; ``None``: those that are still read, each once.
    """

    planner: Planner
    timeline: Timeline
    policy: FreezePolicy
    num_blocks: int
    may_cache: bool
    overhead_s: float = 0.0
    rate: Callable[[int, int], float] | None = None
    must_cache: bool = False
    num_samples: Callable[[int], int] | None = None

    def history(self) -> RunHistory:
        """Returns the history of the run from its first step to its last.

        Raises:
            InfeasiblePlan: Nothing fits the devices.
        """
        run = _PredictedRun(self)
        if self.policy.frozen_at_start:
            run.go_to(0, Decision(self.policy.frozen_at_start, "start", "frozen from the start"))
        for step in range(self.timeline.num_steps):
            if self.timeline.is_decision_step(step) and not self.policy.is_static:
                run.decide(step)
            else:
                run.hold_to_target(step)
            run.step(step)
        return run.history

    def estimate(self, batch_size: int) -> dict[str, Any]:
        """Returns time and memory of the run before its first step.

        Returns:
            Seconds of an optimizer step, an epoch and the run's training under the first plan, without evaluations;
            of the run with the blocks frozen that the policy is predicted to freeze, and how many are frozen at most,
            both ``None`` where nothing freezes or nothing is found that fits; and the bytes of the devices of a
            pipeline under the first plan, with the budget of each.
        """
        plan, step_s = self.planner.initial(), self.planner.predict(self.planner.initial())
        frozen_s, num_frozen = None, None
        if not self.policy.never_freezes:
            try:
                history = self.history()
            except InfeasiblePlan:  # at a later decision, which may come out otherwise
                pass
            else:
                frozen_s = history.train_seconds
                num_frozen = max(entry.plan.num_frozen for entry in history.entries)
        return {
            "step_seconds": step_s,
            "epoch_seconds": step_s * self.timeline.steps_per_epoch,
            "train_seconds": step_s * self.timeline.num_steps,
            "train_seconds_frozen": frozen_s,
            "num_frozen": num_frozen,
            "device_bytes": list(device_memory_bytes(self.planner.profile, plan, batch_size)),
            "device_budget": self.planner.cluster.device_memory_bytes,
        }


class _PredictedRun:
    """The state of a predicted run between two steps."""

    def __init__(self, setting: Foresight) -> None:
        self._setting = setting
        self.history = RunHistory(setting.num_blocks, setting.may_cache)
        self._last = setting.planner.first
        self.history.plan(PlanRecord(self._last.after, 0, self._last.reason))
        self._policy_state = setting.policy.initial_state()
        self._num_decisions = 0
        self._step_s = setting.planner.predict(self._plan)
        seconds = partial(setting.planner.frozen_step_seconds, setting.may_cache)
        self._target = Target.of(setting.policy, setting.num_blocks, seconds, setting.timeline.num_steps)
        self._spent = TargetState(proposal=setting.policy.frozen_at_start)

    @property
    def _plan(self) -> Plan:
        return self.history.entries[-1].plan

    def decide(self, step: int) -> None:
        frozen, setting, num_steps = self._plan.num_frozen, self._setting, self._setting.timeline.num_steps
        signals = Signals(
            self._num_decisions,
            setting.num_blocks,
            frozen,
            self._signals(frozen),
            step / num_steps,
            1.0 if setting.rate is None else setting.rate(step, num_steps),
        )
        decision, self._policy_state = ask(self._setting.policy, signals, self._policy_state)
        self._num_decisions += 1
        if self._target is not None:
            self._spent.ask(decision.num_frozen)
            decision = self._target.scaled(decision, self._spent, setting.timeline.progress(step), frozen)
            self._spent.take(decision.num_frozen)
        if decision.num_frozen != frozen:
            self.go_to(step, decision)

    def hold_to_target(self, step: int) -> None:
        """Freezes what a target asks for between the decisions of the policy."""
        if self._target is None:
            return
        done, num_frozen = self._setting.timeline.progress(step), self._plan.num_frozen
        decision = self._target.decision(self._spent, done, num_frozen)
        if decision is not None:
            self._spent.take(decision.num_frozen)
            self.go_to(step, decision)

    def _signals(self, num_frozen: int) -> dict[str, tuple[float, ...]]:
        setting = self._setting
        signals = made_up_signals(setting.policy, setting.num_blocks, num_frozen)
        if "step_share" in signals:  # is known
            signals["step_share"] = setting.planner.step_shares()
        if self._num_decisions == 0:
            signals |= dict.fromkeys(REFERENCED & signals.keys(), (math.inf,) * setting.num_blocks)
        return signals

    def step(self, step: int) -> None:
        timeline = self._setting.timeline
        index = step % timeline.steps_per_epoch
        num_samples = min(timeline.batch_size, timeline.num_samples - index * timeline.batch_size)
        self.history.step(num_samples, self._step_s)
        if self._target is not None:
            run_seconds = self._step_s * timeline.num_steps
            self._target.spend(self._spent, self._plan.num_frozen, run_seconds, timeline.progress(step))

    def go_to(self, step: int, decision: Decision) -> None:
        """Makes the transition that follows from a decision."""
        setting, timeline = self._setting, self._setting.timeline
        num_samples = (setting.num_samples or timeline.samples_left)(step)
        remaining = RemainingRun(
            timeline.steps_left(step), num_samples, setting.overhead_s, setting.may_cache, setting.must_cache
        )
        self._last = transition = setting.planner.transition(self._last, decision.num_frozen, remaining)
        plan, seconds, why = transition.after, transition.cost_s, transition.reason
        self.history.plan(PlanRecord(plan, step, decision.reason, seconds, num_samples, why))
        self._step_s = setting.planner.predict(plan)
        if self._target is not None:
            self._target.spend_transition(self._spent, transition.cost_s)


def made_up_signals(policy: FreezePolicy, num_blocks: int, num_frozen: int) -> dict[str, tuple[float, ...]]:
    """Returns signals under which a policy freezes as early as it may."""
    nothing = dict.fromkeys(policy.signals, (0.0,) * num_blocks)
    return nothing | {"gradient_norm": falling_norms(num_blocks, num_frozen)}


def falling_norms(num_blocks: int, num_frozen: int) -> tuple[float, ...]:
    """Returns norms with which the paper's rule is bound by its cap: zero where frozen, smallest at the top."""
    return tuple(0.0 if block < num_frozen else float(num_blocks - block) for block in range(num_blocks))

"""Freeze decisions of the training loop: measures, asks the policy, holds it to its target, reports, and follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pipetransformer.autopipe.plan import Plan
from pipetransformer.errors import UserError
from pipetransformer.freeze.answer import ask, ask_rates
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals
from pipetransformer.planning.target import Progress, Target
from pipetransformer.training.position import inside

if TYPE_CHECKING:
    from pipetransformer.training.trainer import Trainer


class RunDecisions:
    """The decisions of one rank's training loop. Every rank makes the same calls.

    Args:
        trainer: The loop, whose state holds the memory of policy and target.

    Raises:
        UserError: The policy's target cannot be met.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._policy = trainer, trainer.config.freeze
        num_steps, is_new = trainer.timeline.num_steps, trainer.components.resumed is None
        self._target = Target.of(self._policy, trainer.num_blocks, self._step_seconds, num_steps, is_new)
        self._known_s: dict[Plan, float] = {}  # predicted seconds of a step
        if note := self._policy.shortfall(trainer.planner.step_shares()):
            trainer.report.write("warning", message=note)

    def _step_seconds(self) -> tuple[float, ...]:
        return self._trainer.planner.frozen_step_seconds(self._trainer.cache_session.is_on)

    def heed_times(self) -> None:
        """Counts the target's costs by what the planner knows now of the seconds of a step."""
        self._known_s.clear()
        if self._target is not None:
            self._target = self._target.at_speed(self._step_seconds, self._trainer.timeline.num_steps)

    def resume(self, settings: Mapping[str, Any]) -> None:
        """Takes the target up where a run goes on, and warns where it can no longer be met.

        Args:
            settings: Of the run before.
        """
        self.heed_times()
        if self._target is None:
            return
        state = self._trainer.state
        if settings.get(self._target.option.partition("=")[0]) is None:
            num_steps = Counter[int]()
            for entry in state.history.entries:
                num_steps[entry.plan.num_frozen] += len(entry.step_seconds)
            self._target.begin(state.target, state.num_frozen, num_steps, self._done)
        if note := self._target.shortfall(state.target, self._done):
            self._trainer.report.write("warning", message=note)

    def decide_if_due(self) -> None:
        """Decides before a step at which that is due. Collective."""
        trainer, state = self._trainer, self._trainer.state
        if trainer.timeline.is_decision_step(state.step) and state.decided_at != state.step:
            state.decision_due |= not (self._policy.is_static or state.guard.holds)
        if state.decision_due and state.num_updates:  # put off where all steps since the last one were skipped
            self._decide()
        elif self._target is not None and not (state.guard.holds or state.target.is_paused):
            decision = self._target.decision(state.target, self._done, trainer.plan.num_frozen)
            if decision is not None:
                self._take(decision, {}, trainer.plan.num_frozen)

    @property
    def _done(self) -> Progress:
        return self._trainer.timeline.progress(self._trainer.state.step)

    def _decide(self) -> None:
        """Asks the policy, and goes to the plan that follows from its answer."""
        trainer, state, before = self._trainer, self._trainer.state, self._trainer.plan.num_frozen
        trainer.flush_log()
        signals = self._read_signals()
        decision, policy_state = ask(self._policy, signals, state.policy_state)
        check_alike(self._policy, signals.decision, decision.num_frozen)
        if self._target is not None:
            state.target.ask(decision.num_frozen)
            decision = self._target.scaled(decision, state.target, self._done, before)
        if decision.num_frozen > before:
            trainer.guard.watch()
        state.count_decision(decision.num_frozen, policy_state)
        trainer.signals.start_anew()
        self._take(decision, signals.measured, before, signals=signals)

    def _take(
        self, decision: Decision, measured: Mapping[str, Sequence[float]], before: int, signals: Signals | None = None
    ) -> None:
        """Reports a decision and makes the transition that follows from it."""
        trainer, state = self._trainer, self._trainer.state
        if signals is None and decision.num_frozen > before:
            trainer.guard.watch()
        state.num_frozen = decision.num_frozen
        state.target.take(decision.num_frozen)
        seconds = trainer.signals.seconds if signals is not None else {}
        self.report(decision, before, measured, state.step, signal_seconds=seconds)
        if signals is not None:
            for callback in trainer.callbacks:
                callback.on_decision(trainer, signals, decision)
        if decision.num_frozen != before:
            trainer.follow(decision)

    def _read_signals(self) -> Signals:
        """Returns what the policy sees. Collective."""
        trainer, state, num_steps = self._trainer, self._trainer.state, self._trainer.timeline.num_steps
        with inside("the measuring of signals", state.step):
            measured = trainer.signals.read()
        return Signals(
            decision=state.num_decisions,
            num_blocks=trainer.num_blocks,
            num_frozen=trainer.plan.num_frozen,
            measured=measured,
            progress=state.step / num_steps,
            rate=trainer.components.optim.rate(state.step, num_steps),
        )

    def report(
        self, decision: Decision, before: int, measured: Mapping[str, Sequence[float]], step: int, **more: Any
    ) -> None:
        """Reports a decision of the policy, its target or the guard.

        Args:
            before: Blocks that were frozen before it.
            measured: The signals that it saw, by name; none of the guard's.
            step: Optimizer steps before it.
        """
        trainer = self._trainer
        trainer.flush_log()
        trainer.report.write(
            "decision",
            step=step,
            epoch=step / trainer.timeline.steps_per_epoch,
            num_frozen_before=before,
            num_frozen=decision.num_frozen,
            bound=decision.bound,
            reason=decision.reason,
            terms=decision.terms,
            gradient_norms=list(measured.get("gradient_norm", [0.0] * trainer.num_blocks)),
            signals={name: list(values) for name, values in measured.items() if name != "gradient_norm"},
            **more,
        )

    def count_step(self) -> None:
        """Counts the present step towards the target."""
        trainer, plan, step = self._trainer, self._trainer.plan, self._trainer.state.step
        if self._target is not None:
            if plan not in self._known_s:
                self._known_s[plan] = trainer.planner.predict(plan)
            run_seconds = self._known_s[plan] * trainer.timeline.num_steps
            self._target.spend(trainer.state.target, plan.num_frozen, run_seconds, trainer.timeline.progress(step))

    def count_transition(self) -> None:
        """Counts the last transition towards the target."""
        trainer = self._trainer
        if self._target is not None and trainer.runtime.transition is not None:
            self._target.spend_transition(trainer.state.target, trainer.runtime.transition.cost_s)

    def layer_rates(self, rate: float) -> float | list[float]:
        """Returns the rate of the head, or where the policy anneals blocks, that of each layer."""
        if not self._policy.has_own_rates:
            return rate
        trainer = self._trainer
        blocks = ask_rates(self._policy, trainer.state.step / trainer.timeline.num_steps, trainer.num_blocks)
        rates = trainer.components.optim.rates(rate, trainer.num_blocks + 2)
        # the embedding freezes with the first block
        return [own * factor for own, factor in zip(rates, (blocks[0], *blocks, 1.0), strict=True)]


def check_alike(policy: FreezePolicy, count: int, num_frozen: int) -> None:
    """Refuses a policy that answers otherwise on another rank, which would then wait for this one. Collective.

    Args:
        count: Decisions before this one.
        num_frozen: What it answers on this rank.

    Raises:
        UserError: On every rank alike.
    """
    answers = [0] * dist.get_world_size()
    dist.all_gather_object(answers, num_frozen)
    other = next((rank for rank, each in enumerate(answers) if each != answers[0]), None)
    if other is not None:
        raise UserError(
            f"at freeze decision {count} {type(policy).__name__}.decide returned num_frozen={answers[0]} on rank 0 and "
            f"{answers[other]} on rank {other}, for the same signals; let it decide by its arguments alone: no clock, "
            "no randomness, no memory besides its state"
        )

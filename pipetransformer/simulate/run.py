"""Plays a whole run without devices: the same clock, freeze policy, planner and ledger as a run, with predicted times.

There are no gradients, so policies are asked with made-up norms that fall from block to block: the topmost block
always has the smallest one. The paper's rule is then bound by its cap alone.
"""

from pipetransformer.autopipe.plan import Plan
from pipetransformer.config.schema import SimulationConfig
from pipetransformer.freeze.base import Decision, Signals
from pipetransformer.planning.history import PlanRecord, RunHistory
from pipetransformer.planning.planner import Planner, RemainingRun
from pipetransformer.planning.timeline import Timeline


def play(config: SimulationConfig, planner: Planner) -> RunHistory:
    """The books of a run from its first step to its last."""
    player = _Player(config, planner)
    for step in range(player.timeline.num_steps):
        if player.timeline.is_decision_step(step) and not config.freeze.never_freezes:
            player.decide(step)
        player.step(step)
    return player.history


class _Player:
    def __init__(self, config: SimulationConfig, planner: Planner) -> None:
        self.config, self.planner = config, planner
        self.timeline = Timeline.of(config, config.num_samples)
        self.num_blocks = config.shape.num_blocks
        self._may_cache = config.cache.enabled and config.parallel.autopipe
        self.history = RunHistory(self.num_blocks, self._may_cache)
        self._last = planner.first
        self.history.plan(PlanRecord(self._last.after, 0, self._last.reason))
        self._policy_state = config.freeze.initial_state()
        self._num_decisions = 0
        self._step_s = planner.predict(self.plan)

    @property
    def plan(self) -> Plan:
        return self.history.entries[-1].plan

    def decide(self, step: int) -> None:
        frozen = self.plan.num_frozen
        signals = Signals(self._num_decisions, self.num_blocks, frozen, falling_norms(self.num_blocks, frozen))
        decision, self._policy_state = self.config.freeze.decide(signals, self._policy_state)
        self._num_decisions += 1
        if decision.num_frozen != frozen:
            self._transition(step, decision)

    def step(self, step: int) -> None:
        index, batch_size = step % self.timeline.steps_per_epoch, self.config.batch_size
        num_samples = min(batch_size, self.config.num_samples - index * batch_size)
        self.history.step(num_samples, self._step_s)

    def _transition(self, step: int, decision: Decision) -> None:
        timeline, overhead_s = self.timeline, self.config.cluster.transition_s
        remaining = RemainingRun(timeline.steps_left(step), timeline.samples_left(step), overhead_s, self._may_cache)
        self._last = transition = self.planner.transition(self._last, decision.num_frozen, remaining)
        plan, seconds, why = transition.after, transition.cost_s, transition.reason
        self.history.plan(PlanRecord(plan, step, decision.reason, seconds, remaining.num_samples, why))
        self._step_s = self.planner.predict(plan)


def falling_norms(num_blocks: int, num_frozen: int) -> tuple[float, ...]:
    """Gradient norms with which the paper's rule is bound by its cap: zero where frozen, smallest at the top."""
    return tuple(0.0 if block < num_frozen else float(num_blocks - block) for block in range(num_blocks))

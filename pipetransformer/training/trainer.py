"""The training loop: decide, step, evaluate, log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from pipetransformer.autopipe.plan import Plan
from pipetransformer.config.schema import Config
from pipetransformer.errors import LoopLeft, StepRefused, UserError
from pipetransformer.freeze.base import Decision, Signals
from pipetransformer.planning.foresight import Foresight
from pipetransformer.planning.history import RunHistory
from pipetransformer.planning.state import TrainState
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.event_log import EVENT_LOG
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.groups import broadcast_from_rank0
from pipetransformer.runtime.result import StepResult
from pipetransformer.runtime.signals.base import SignalContext
from pipetransformer.runtime.signals.collect import SignalCollectors
from pipetransformer.training import interrupt
from pipetransformer.training.batch_order import BatchOrder
from pipetransformer.training.build import RunComponents
from pipetransformer.training.cache_session import CacheSession, CacheTerms
from pipetransformer.training.checkpoints import Checkpoints, about_run, next_batch_digest
from pipetransformer.training.decisions import RunDecisions
from pipetransformer.training.evaluations import RunEvaluations
from pipetransformer.training.guard import RunGuard
from pipetransformer.training.main_metric import MainMetric
from pipetransformer.training.plan_timing import PlanTiming
from pipetransformer.training.position import STEP, inside
from pipetransformer.training.resume import cut_log
from pipetransformer.training.spent import Spent
from pipetransformer.training.step_log import StepLog
from pipetransformer.training.stops import RunStops
from pipetransformer.training.tracer import Tracer
from pipetransformer.training.transitions import Transitions


class Callback:
    """Hooks of a training loop, each called on every rank after what it is named after. Override those you need.

    A hook that runs a collective has to do so on every rank.

    Raises:
        UserError: A subclass has a method ``on_...`` that is no hook: nobody would call it.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in hooks:
                raise UserError(f"{cls.__name__}.{name} is no hook; there are {', '.join(hooks)}")

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Called after each optimizer step; reading ``result.loss`` waits for it."""

    def on_decision(self, trainer: Trainer, signals: Signals, decision: Decision) -> None:
        """Called after each decision of the freeze policy, before the transition that may follow."""

    def on_transition(self, trainer: Trainer, before: Plan, after: Plan) -> None:
        """Called after each transition to another plan."""

    def on_evaluate(self, trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
        """Called after each evaluation of a split."""


class Trainer:
    """One rank's training loop. Every rank runs it alike; only rank 0's report shows anything.

    Iterating runs one optimizer step at a time, from the state's step to the end of the run. Decisions, transitions
    and the evaluations of the section ``evaluate`` happen inside.

    Args:
        components: Data, model, planner, cache and runtime of this rank.
        report: Receives the events of the run.
        run_dir: Folder of the event log, checkpoints and traces.
        callbacks: Called on every rank.

    Attributes:
        state: Everything that the run has to know to go on.
        spent: Counts of the summary that are rank 0's own.
        num_steps_lost: Logged steps after the checkpoint from which the run went on.
        estimate: Time and memory of a new run, predicted before its first step; empty on all ranks but 0.
    """

    def __init__(
        self, config: Config, components: RunComponents, report: Reporter, run_dir: Path,
        callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        self.config, self.components, self.report, self._callbacks = config, components, report, tuple(callbacks)
        self.runtime, self.planner, cache = components.runtime, components.planner, components.cache_setup.cache
        self.num_blocks = components.stack.num_blocks
        self.timeline = Timeline.of(config, len(components.data.train))
        terms = CacheTerms(run_dir, config.freeze.is_static, config.cache.require, self.planner)
        self.cache_session = CacheSession(
            cache, components.train, components.evaluation, self.runtime, report, self.timeline, components.order, terms
        )
        measured = SignalContext(self.runtime, components.train.source, self.planner.step_shares)
        self.signals = SignalCollectors(config.freeze.signals, measured)
        self.runtime.observer = self.signals.observer
        self.state = TrainState(
            seed=config.seed,
            history=RunHistory(self.num_blocks, self.cache_session.is_on, config.baseline),
            loss_scale=self.runtime.loss_scale,
            signals=self.signals,
            steps_per_epoch=self.timeline.steps_per_epoch,
            policy_state=config.freeze.initial_state(),
        )
        self._transitions = Transitions(
            self.planner, self.runtime, self.cache_session, self.timeline, self.state, report
        )
        self._batches = BatchOrder(components.order, self.timeline, components.train)
        self._log = StepLog(report, self.runtime, self.timeline)
        trace_dir = run_dir if config.trace else None
        self.tracer = Tracer(trace_dir, self.runtime.recorder, self.timeline, self.state.history)
        splits = [loader.split for loader in components.evaluation]
        self.main_metric = MainMetric(config.evaluate, splits, components.data.task.metrics, self.state)
        about, order = about_run(config, components, report, run_dir), components.order
        self.checkpoints = Checkpoints(
            config, self.runtime, self.timeline, order, about, report, run_dir, self.main_metric,
            lambda: self.spent.state_dict(),
        )  # fmt: skip
        parts = {"input": self._log, "cache": self.cache_session, "checkpoints": self.checkpoints}
        self.spent = Spent(report, parts)
        self.guard, self.stops = RunGuard(self, run_dir), RunStops(self)
        self.evaluations, self.decisions = RunEvaluations(self), RunDecisions(self)
        self._plan_timing = PlanTiming(self)
        self._run_dir, self.num_steps_lost = run_dir, 0
        self.estimate: dict[str, Any] = {}
        self._prefetching = False  # it is announced which batches come

    @property
    def plan(self) -> Plan:
        """Plan in force."""
        assert self.runtime.plan is not None
        return self.runtime.plan

    def start(self) -> None:
        """Goes to the first plan, or to one for where the run to be resumed stood."""
        resumed = self.components.resumed
        if resumed is None:
            self._transitions.start(self.components.first)
            self.estimate = self._foresee() if dist.get_rank() == 0 else {}
            self._plan_timing.start()
            return
        manifest = resumed.checkpoint.manifest
        self.state.load_state_dict(manifest.train)
        self.tracer.go_back()
        self.planner.recall(self.state.history.timed(self.planner))
        if dist.get_rank() == 0:
            self.spent.load_state_dict(manifest.spent)
        if self.config.resume.allow:
            self.state.patience.reason = ""  # it may have ended early, and is to go on
        self.decisions.resume(manifest.settings)
        if manifest.settings.get("evaluate.metric") != self.config.evaluate.metric:
            self.main_metric.begin_anew()
        self._transitions.start(self.planner.resumed(self.state.num_frozen), resumed.layers)
        expected = next_batch_digest(self.state, self.timeline, self.components.order)
        is_allowed = bool(self.config.resume.allow)  # for example another batch size
        assert is_allowed or manifest.sample_ids == expected, "the next batch is the one that would have followed"
        cut = self._run_dir / EVENT_LOG, manifest.log_bytes, resumed.checkpoint.log_end
        lost = cut_log(*cut) if dist.get_rank() == 0 else (0, 0)
        self.num_steps_lost, num_attempts = broadcast_from_rank0(lost)
        self.state.num_resumes = max(self.state.num_resumes, num_attempts) + 1
        self.state.num_steps_lost += self.num_steps_lost
        for note in resumed.checkpoint.notes:
            self.report.write("warning", message=f"a newer checkpoint is passed over: {note}")
        self._plan_timing.start()

    def _foresee(self) -> dict[str, Any]:
        """Returns time and memory of the run as they are predicted before its first step."""
        cache = self.cache_session
        foresight = Foresight(
            self.planner, self.timeline, self.config.freeze, self.num_blocks, cache.is_on, self.state.overhead_s,
            self.components.optim.rate, cache.is_required, cache.num_samples,
        )  # fmt: skip
        return foresight.estimate(self.config.batch_size)

    def go_to(self, state: dict[str, Any], load: Callable[[], None], reason: str = "goes on from another step") -> None:
        """Takes over the state of another step, and goes to a plan for its frozen blocks without a cache.

        Args:
            load: Gives the layers the weights of that step.
        """
        self.flush_log()
        before_s = self.state.history.train_seconds
        self.state.load_state_dict(state)
        self.tracer.go_back()
        lost_s = max(0.0, before_s - self.state.history.train_seconds)
        self._transitions.replace(self.planner.resumed(self.state.num_frozen).after, reason, load, lost_s)
        self.stops.forget()
        self.prefetch_anew()
        self._batches.forget()

    def cache_again(self) -> None:
        """Goes to the plan with the cache, where a run goes on with frozen blocks."""
        is_over, begins = self.state.step >= self.timeline.num_steps, self.state.step == 0
        if self.state.num_frozen and self.cache_session.is_on and not (is_over or begins):
            self.follow(Decision(self.state.num_frozen, "resume", f"resumed at step {self.state.step}"))

    def freeze_at_start(self) -> None:
        """Goes to the plan for the blocks that are frozen before the first step."""
        num_frozen = self.config.freeze.frozen_at_start
        if num_frozen and self.state.step == 0:
            reason = f"{num_frozen} of {self.num_blocks} blocks are frozen from the start"
            self.state.num_frozen = num_frozen
            self.state.target.take(num_frozen)
            self.follow(Decision(num_frozen, "start", reason))

    def __iter__(self) -> Iterator[StepResult]:
        """Yields the result of each step.

        Raises:
            Diverged: Loss or gradient is not finite, or explodes with ``guard.exploding=stop``, on every rank alike.
            FreezeHurts: The main metric fell after a freeze, with ``guard.freeze=stop``.
            Stopped: A signal asked for it, in a run of the command or ``pt.train``; saved, if checkpoints are on.
        """
        with interrupt.deferred():
            try:
                if self.state.evaluation_due:  # when the run was stopped
                    self.evaluations.run_and_judge()
                while not self.is_over:
                    yield self._next_step()
            except LoopLeft:
                self.stops.save_and_stop()
            self.flush_log()
            self.checkpoints.wait()

    def _next_step(self) -> StepResult:
        state = self.state
        self._plan_timing.look()
        self.decisions.decide_if_due()
        if not self._prefetching:
            self.cache_session.prefetch(self._batches.coming(state.step, self.evaluations.is_due))
            self._prefetching = True
        with self.tracer.step(state.step), inside(STEP, state.step):
            result = self._train_step(self._batches.ids(state.step))
        for callback in self._callbacks:
            callback.on_step(self, result)
        if self.evaluations.is_due(state.step):
            self.state.evaluation_due = True
            if self.evaluations.run_and_judge():
                return result
        self.stops.follow(result)
        return result

    @property
    def is_over(self) -> bool:
        """True after the last step, or where the run ends early."""
        return self.state.step >= self.timeline.num_steps or bool(self.state.patience.reason)

    def _train_step(self, ids: np.ndarray) -> StepResult:
        state, start = self.state, time.perf_counter()
        waited_s, input_waited_s = self.cache_session.waited_s, self.components.train.waited_s
        rate = self.components.optim.rate(state.step, self.timeline.num_steps)
        requests, max_norm, verdict = self.stops.requests(), self.guard.max_norm, None
        self.signals.set_due(state.num_updates)
        try:
            result = self.runtime.train_step(
                self.components.train, ids, state.step, self.decisions.layer_rates(rate), requests, max_norm
            )
        except StepRefused as error:
            self._log.flush()
            result, verdict = error.result, self.guard.judge_step(error, rate)
        if not result.skipped:
            state.num_updates += 1
            self.signals.add_step(result)
            state.guard.add_norm(result.total_norm)
        self.decisions.count_step()
        state.step += 1
        self._log.flush()
        seconds = time.perf_counter() - start
        state.history.step(len(ids), seconds, self._batches.size(ids))
        waits_s = self.cache_session.waited_s - waited_s, self.components.train.waited_s - input_waited_s
        self._log.note(state.step, result, rate, len(ids), seconds, *waits_s)
        if verdict is not None:
            self.guard.follow(verdict)
        return result

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """Hooks of the user."""
        return self._callbacks

    def follow(self, decision: Decision) -> None:
        """Makes the transition that follows from a decision. Collective."""
        self._go(lambda: self._transitions.follow(decision, self.state.step))

    def improve_plan(self, reason: str) -> None:
        """Goes to a plan that is faster by what has been measured since the last transition, if any is. Collective."""
        self._go(lambda: self._transitions.improve(self.state.step, reason))

    def try_plan(self, plan: Plan, reason: str) -> None:
        """Goes to a plan with nothing frozen, whether it is faster or not. Collective."""
        self._go(lambda: self._transitions.try_plan(plan, self.state.step, reason))

    def _go(self, transition: Callable[[], object]) -> None:
        """Makes a transition, if one is made, and tells those who want to know of it."""
        before, last = self.plan, self.runtime.transition
        with inside("a transition", self.state.step):
            transition()
        if self.runtime.transition is last:
            return
        self.decisions.count_transition()
        self.prefetch_anew()
        for callback in self._callbacks:
            callback.on_transition(self, before, self.plan)

    def prefetch_anew(self) -> None:
        """Announces the coming batches anew before the next step."""
        self._prefetching = False

    def flush_log(self) -> None:
        """Reports the last step, whose loss may still be all-reduced, and writes all that is reported."""
        self._log.flush()
        self.report.flush()

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Scores every evaluation split under the current plan.

        Returns:
            Metrics by split, equal on every rank.
        """
        return self.evaluations.run()

    def summary(self) -> dict[str, Any]:
        """The run in figures, as far as it has come."""
        summary: dict[str, Any] = {"metrics": self.state.metrics, "last_step": self.state.step}
        summary |= self.main_metric.figures() | self._log.scaling()
        if traces := self.tracer.files:
            summary["traces"] = traces
        if measuring := self.signals.figures():
            summary["signals"] = measuring
        summary["input"] = {"num_workers": self.components.inputs.num_workers} | self._log.input_figures()
        if cache := self.cache_session.figures():
            summary["cache"] = cache
        if guarded := self.guard.figures():
            summary["guard"] = guarded
        if saved := self.checkpoints.figures():
            resumed = {"num_resumes": self.state.num_resumes, "num_steps_lost": self.state.num_steps_lost}
            summary["checkpoints"] = saved | resumed
        return summary | self.state.history.summary(self.planner)

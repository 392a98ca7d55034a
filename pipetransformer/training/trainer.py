"""The loop: decide, step, evaluate, log."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipetransformer.autodp.sampler import batch_ids, epoch_order
from pipetransformer.autopipe.gain import Choice
from pipetransformer.autopipe.plan import Plan
from pipetransformer.config import Config
from pipetransformer.freeze.base import Decision, Signals
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime, NotFinite, StepResult, TransitionReport
from pipetransformer.runtime.signals import of_rank_0
from pipetransformer.training import stop
from pipetransformer.training.caching import Caching
from pipetransformer.training.clock import Clock
from pipetransformer.training.evaluate import evaluate
from pipetransformer.training.feed import Feed
from pipetransformer.training.ledger import Entry, Ledger, plan_dict
from pipetransformer.training.planner import Ahead
from pipetransformer.training.setup import Prepared
from pipetransformer.training.tracer import Tracer


class Diverged(ArithmeticError):
    """The loss is not finite; the weights are those before the step."""


class Trainer:
    """One rank's training loop. All ranks run it alike; only rank 0's report shows anything.

    Args:
        report: Takes the events of the run.
        run_dir: Where traces go.
    """

    def __init__(
        self, config: Config, prepared: Prepared, runtime: ElasticRuntime, report: Reporter, run_dir: Path
    ) -> None:
        self.config, self.prepared, self.runtime = config, prepared, runtime
        cache = prepared.storage.cache
        self.report = report
        self.planner = prepared.planner
        self.num_blocks = prepared.stack.num_blocks
        self.clock = Clock.of(config, len(prepared.data.train))
        self.caching = Caching(
            cache, prepared.train, prepared.evaluation, runtime, report, self.clock, config.seed
        )  # fmt: skip
        self.ledger = Ledger(self.num_blocks, may_cache=cache is not None)
        self.tracer = Tracer(run_dir if config.trace else None, runtime.recorder, self.clock, self.ledger)
        self.metrics: dict[str, dict[str, float]] = {}
        self.step = 0
        self._norms = torch.zeros(self.num_blocks, dtype=torch.float64)
        self._num_norms = 0
        self._num_decisions = 0
        self._overhead_s = 0.0  # of a transition, as last measured
        self._is_due = False  # a decision
        self._unreported: Callable[[], None] | None = None  # the last step, whose loss is still under way
        self._reads_ahead = False  # the cache knows the order of what comes
        self._policy_state = config.freeze.initial_state()

    @property
    def plan(self) -> Plan:
        assert self.runtime.plan is not None
        return self.runtime.plan

    def start(self) -> None:
        """Goes to the first plan."""
        plan = self.prepared.first_plan
        self._apply(plan)
        self.ledger.plan(Entry(plan, 0, "fastest plan with nothing frozen"))

    def freeze_at_start(self) -> None:
        """Goes to the plan for what is frozen before the first step.

        Raises:
            ValueError: The model has fewer blocks.
        """
        num_frozen = self.config.freeze.frozen_at_start
        if num_frozen > self.num_blocks:
            raise ValueError(f"freeze.at_start={num_frozen} is more than the {self.num_blocks} blocks of the model")
        if num_frozen:
            self._transition(Decision(num_frozen, "start", f"{num_frozen} blocks are frozen from the start"))

    def run(self) -> None:
        """Trains from the current step to the end and evaluates.

        Raises:
            Diverged: Loss or gradient not finite, on every rank alike.
        """
        for epoch in range(self.config.epochs):
            order = epoch_order(len(self.prepared.data.train), epoch, self.config.seed)
            self.prepared.train.set_epoch(epoch)
            self._reads_ahead = False
            for index in range(self.clock.steps_per_epoch):
                self._is_due |= self.clock.decides(self.step) and not self.config.freeze.never_freezes
                if self._is_due and self._num_norms:  # put off where all steps since the last one were skipped
                    self._decide()
                if not self._reads_ahead:
                    self._read_ahead(order, index)
                with self.tracer.step(self.step):
                    self._train_step(batch_ids(order, index, self.config.batch_size))
            last = epoch + 1 == self.config.epochs
            if last or (epoch + 1) % self.config.eval_every_epochs == 0:
                self.evaluate()

    def _read_ahead(self, order: np.ndarray, index: int) -> None:
        """From here to the end of the epoch, or to the next transition."""
        coming = range(index, self.clock.steps_per_epoch)
        self.caching.read_ahead((batch_ids(order, later, self.config.batch_size) for later in coming), self.plan)
        self._reads_ahead = True

    def _train_step(self, ids: np.ndarray) -> None:
        stop.check()
        start, waited_s = time.perf_counter(), self.caching.waited_s
        engine = self.runtime.engine
        batch = None
        if engine is not None:
            batch, _ = self.prepared.train.batch(ids, self.plan, engine.position, self.step)
        rate = self.config.optim.rate(self.step, self.clock.num_steps)
        try:
            result = self.runtime.step(batch, rate)
        except NotFinite as error:
            self._report_last_step()
            wider = ", take precision=bfloat16, whose range is wider," if self.runtime.precision.scales_loss else ""
            raise Diverged(
                f"step {self.step + 1}: {error}. The weights of the step before are kept; lower "
                f"optim.lr={rate:g}{wider} or check the data"
            ) from error
        if not result.skipped:
            self._norms += torch.tensor(result.layer_norms[1:-1], dtype=torch.float64)
            self._num_norms += 1
        self.step += 1
        self._report_last_step()
        seconds = time.perf_counter() - start
        self.ledger.step(len(ids), seconds)
        others = self._scaling() | self._waiting(waited_s)
        self._unreported = partial(self._report_step, self.step, result, rate, len(ids), seconds, others)

    def _report_last_step(self) -> None:
        """One step late, so that no rank waits for the others' losses at the end of each step."""
        if self._unreported is not None:
            self._unreported()
            self._unreported = None

    def _report_step(
        self, step: int, result: StepResult, rate: float, num_samples: int, seconds: float, others: dict[str, float]
    ) -> None:
        self.report.write(
            "step",
            step=step,
            epoch=step / self.clock.steps_per_epoch,
            loss=result.loss,
            lr=rate,
            grad_norm=result.total_norm,
            step_seconds=seconds,
            samples_per_second=num_samples / seconds,
            num_frozen=self.plan.num_frozen,
            num_stages=self.plan.num_stages,
            num_replicas=self.plan.num_replicas,
            cache_level=self.plan.cache_level,
            **others,
        )

    def _scaling(self) -> dict[str, float]:
        """The loss scale of the next step, and the steps skipped so far; nothing without scaling."""
        if not self.runtime.precision.scales_loss:
            return {}
        scale = self.runtime.loss_scale
        return {"loss_scale": scale.value, "num_skipped_steps": scale.num_skipped}

    def _waiting(self, waited_before_s: float) -> dict[str, float]:
        """How long the step waited for the cache, where it reads one."""
        return {"cache_wait_seconds": self.caching.waited_s - waited_before_s} if self.plan.cache_level else {}

    def _decide(self) -> None:
        """Asks the policy, and goes to the plan that follows from its answer."""
        self._report_last_step()
        norms = tuple(of_rank_0(self._norms / self._num_norms).tolist())
        self._norms[:], self._num_norms, self._is_due = 0, 0, False
        before = self.plan.num_frozen
        signals = Signals(self._num_decisions, self.num_blocks, before, norms)
        decision, self._policy_state = self.config.freeze.decide(signals, self._policy_state)
        self._num_decisions += 1
        self.report.write(
            "decision",
            step=self.step,
            epoch=self.step / self.clock.steps_per_epoch,
            num_frozen_before=before,
            num_frozen=decision.num_frozen,
            bound=decision.bound,
            reason=decision.reason,
            terms=decision.terms,
            gradient_norms=list(norms),
        )
        if decision.num_frozen != before:
            self._transition(decision)

    def _transition(self, decision: Decision) -> None:
        start = time.perf_counter()
        before = self.plan
        ahead, choice = self._choose(decision)
        plan = choice.plan
        planned = time.perf_counter()
        self.caching.go(plan.cache_level, self.step)
        filled = time.perf_counter()
        moved = self._apply(plan)
        self.caching.serve(plan.cache_level)
        self._reads_ahead = False
        seconds = time.perf_counter() - start
        self.ledger.plan(Entry(plan, self.step, decision.reason, seconds, ahead.num_samples, choice.reason))
        self.report.write(
            "transition",
            step=self.step,
            reason=decision.reason,
            before=plan_dict(before),
            after=plan_dict(plan),
            seconds=seconds,
            plan_seconds=planned - start,
            fill_seconds=filled - planned,
            group_seconds=moved.group_s,
            move_seconds=moved.move_s,
            rebuild_seconds=moved.rebuild_s,
            num_moves=moved.num_moves,
            bytes_moved=moved.bytes_moved,
            predicted_gain=before.predicted_step_s / plan.predicted_step_s,
            choice=choice.reason,
        )

    def _choose(self, decision: Decision) -> tuple[Ahead, Choice]:
        """Where to go; once more, without the cache, where that turns out to have no room."""
        steps_left, num_samples = self.clock.steps_left(self.step), self.caching.num_samples(self.step)
        ahead = Ahead(steps_left, num_samples, self._overhead_s, self.caching.is_on)
        choice = self.planner.transition(self.plan, self.runtime.placement, decision.num_frozen, ahead)
        return (ahead, choice) if self.caching.has_room(choice.plan.cache_level) else self._choose(decision)

    def _apply(self, plan: Plan) -> TransitionReport:
        """Goes to a plan, and remembers what that takes besides moving layers."""
        moved = self.runtime.apply(plan)
        self._overhead_s = of_rank_0(torch.tensor(moved.group_s + moved.rebuild_s)).item()
        return moved

    def evaluate(self) -> None:
        """Scores every evaluation split under the current plan."""
        self._report_last_step()
        for feed in self.prepared.evaluation:
            start = time.perf_counter()
            self.metrics[feed.split.name] = evaluate(self.runtime, feed, self._eval_batch_size(feed))
            self.report.write(
                "evaluate",
                step=self.step,
                epoch=self.step / self.clock.steps_per_epoch,
                split=feed.split.name,
                num_samples=feed.split.num_scored,
                metrics=self.metrics[feed.split.name],
                seconds=time.perf_counter() - start,
            )

    def _eval_batch_size(self, feed: Feed) -> int:
        return min(self.config.batch_size, len(feed.split))

    def figures(self) -> dict[str, Any]:
        """The summary, as far as the run has come."""
        summary: dict[str, Any] = {"metric": None, "metrics": self.metrics} | self._scaling()
        if self.metrics:
            split = self.prepared.evaluation[0].split
            values = self.metrics[split.name]
            name, value = next(iter(values.items()))
            summary["metric"] = {
                "name": name,
                "value": value,
                "split": split.name,
                "num_samples": split.num_scored,
            } | values
        if self.tracer.files:
            summary["traces"] = self.tracer.files
        cache = self.caching.figures()
        if cache:
            summary["cache"] = cache
        return summary | self.ledger.summary(self.planner)

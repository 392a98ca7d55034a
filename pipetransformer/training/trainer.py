"""The loop: decide, step, evaluate, log."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipetransformer.autodp.sampler import batch_ids, epoch_order
from pipetransformer.autopipe.plan import Plan
from pipetransformer.config.options import Config
from pipetransformer.errors import Diverged, NotFinite
from pipetransformer.freeze.base import Decision, Signals
from pipetransformer.planning.history import RunHistory
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.signals import broadcast_from_rank0
from pipetransformer.training import interrupt as stop
from pipetransformer.training.build import RunComponents
from pipetransformer.training.cache_session import CacheSession
from pipetransformer.training.evaluate import evaluate
from pipetransformer.training.loader import BatchLoader
from pipetransformer.training.step_log import StepLog
from pipetransformer.training.tracer import Tracer
from pipetransformer.training.transitions import Transitions


class Trainer:
    """One rank's training loop. All ranks run it alike; only rank 0's report shows anything.

    Args:
        report: Takes the events of the run.
        run_dir: Where traces go.
    """

    def __init__(
        self, config: Config, components: RunComponents, runtime: ElasticRuntime, report: Reporter, run_dir: Path
    ) -> None:
        self.config, self.components, self.runtime = config, components, runtime
        cache = components.storage.cache
        self.report = report
        self.planner = components.planner
        self.num_blocks = components.stack.num_blocks
        self.timeline = Timeline.of(config, len(components.data.train))
        self.cache_session = CacheSession(
            cache, components.train, components.evaluation, runtime, report, self.timeline, config.seed
        )  # fmt: skip
        self.history = RunHistory(self.num_blocks, may_cache=cache is not None)
        self._transitions = Transitions(self.planner, runtime, self.cache_session, self.timeline, self.history, report)
        self._log = StepLog(report, runtime, self.timeline)
        self.tracer = Tracer(run_dir if config.trace else None, runtime.recorder, self.timeline, self.history)
        self.metrics: dict[str, dict[str, float]] = {}
        self.step = 0
        self._norms = torch.zeros(self.num_blocks, dtype=torch.float64)
        self._num_norms = 0
        self._num_decisions = 0
        self._is_due = False  # a decision
        self._reads_ahead = False  # the cache knows the order of what comes
        self._policy_state = config.freeze.initial_state()

    @property
    def plan(self) -> Plan:
        assert self.runtime.plan is not None
        return self.runtime.plan

    def start(self) -> None:
        """Goes to the first plan."""
        self._transitions.start(self.components.first_plan)

    def freeze_at_start(self) -> None:
        """Goes to the plan for what is frozen before the first step."""
        num_frozen = self.config.freeze.frozen_at_start
        if num_frozen:
            reason = f"{num_frozen} of {self.num_blocks} blocks are frozen from the start"
            self._follow(Decision(num_frozen, "start", reason))

    def _follow(self, decision: Decision) -> None:
        self._transitions.follow(decision, self.plan, self.step)
        self._reads_ahead = False

    def run(self) -> None:
        """Trains from the current step to the end and evaluates.

        Raises:
            Diverged: Loss or gradient not finite, on every rank alike.
        """
        for epoch in range(self.config.epochs):
            order = epoch_order(len(self.components.data.train), epoch, self.config.seed)
            self.components.train.set_epoch(epoch)
            self._reads_ahead = False
            for index in range(self.timeline.steps_per_epoch):
                self._is_due |= self.timeline.is_decision_step(self.step) and not self.config.freeze.never_freezes
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
        coming = range(index, self.timeline.steps_per_epoch)
        self.cache_session.read_ahead((batch_ids(order, later, self.config.batch_size) for later in coming), self.plan)
        self._reads_ahead = True

    def _train_step(self, ids: np.ndarray) -> None:
        stop.check()
        start, waited_s = time.perf_counter(), self.cache_session.waited_s
        engine = self.runtime.engine
        batch = None
        if engine is not None:
            batch, _ = self.components.train.batch(ids, self.plan, engine.position, self.step)
        rate = self.config.optim.rate(self.step, self.timeline.num_steps)
        try:
            result = self.runtime.step(batch, rate)
        except NotFinite as error:
            self._log.flush()
            wider = ", take precision=bfloat16, whose range is wider," if self.runtime.precision.scales_loss else ""
            raise Diverged(
                f"step {self.step + 1}: {error}. The weights of the step before are kept; lower "
                f"optim.lr={rate:g}{wider} or check the data"
            ) from error
        if not result.skipped:
            self._norms += torch.tensor(result.layer_norms[1:-1], dtype=torch.float64)
            self._num_norms += 1
        self.step += 1
        self._log.flush()
        seconds = time.perf_counter() - start
        self.history.step(len(ids), seconds)
        self._log.note(self.step, result, rate, len(ids), seconds, self.cache_session.waited_s - waited_s)

    def _decide(self) -> None:
        """Asks the policy, and goes to the plan that follows from its answer."""
        self._log.flush()
        norms = tuple(broadcast_from_rank0(self._norms / self._num_norms).tolist())
        self._norms[:], self._num_norms, self._is_due = 0, 0, False
        before = self.plan.num_frozen
        signals = Signals(self._num_decisions, self.num_blocks, before, norms)
        decision, self._policy_state = self.config.freeze.decide(signals, self._policy_state)
        self._num_decisions += 1
        self.report.write(
            "decision",
            step=self.step,
            epoch=self.step / self.timeline.steps_per_epoch,
            num_frozen_before=before,
            num_frozen=decision.num_frozen,
            bound=decision.bound,
            reason=decision.reason,
            terms=decision.terms,
            gradient_norms=list(norms),
        )
        if decision.num_frozen != before:
            self._follow(decision)

    def evaluate(self) -> None:
        """Scores every evaluation split under the current plan."""
        self._log.flush()
        for loader in self.components.evaluation:
            start = time.perf_counter()
            self.metrics[loader.split.name] = evaluate(self.runtime, loader, self._eval_batch_size(loader))
            self.report.write(
                "evaluate",
                step=self.step,
                epoch=self.step / self.timeline.steps_per_epoch,
                split=loader.split.name,
                num_samples=loader.split.num_scored,
                metrics=self.metrics[loader.split.name],
                seconds=time.perf_counter() - start,
            )

    def _eval_batch_size(self, loader: BatchLoader) -> int:
        return min(self.config.batch_size, len(loader.split))

    def figures(self) -> dict[str, Any]:
        """The summary, as far as the run has come."""
        summary: dict[str, Any] = {"metric": None, "metrics": self.metrics} | self._log.scaling()
        if self.metrics:
            split = self.components.evaluation[0].split
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
        cache = self.cache_session.figures()
        if cache:
            summary["cache"] = cache
        return summary | self.history.summary(self.planner)

"""Carries out what the guard of a run decides: skips an update, rolls the run back, unfreezes, or ends it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pipetransformer.checkpoint.source import CheckpointLayers
from pipetransformer.errors import Diverged, FreezeHurts, NotFinite, StepRefused, UserError
from pipetransformer.freeze.base import Decision
from pipetransformer.planning.guard import Verdict, Watched, judge_freeze, judge_step, norm_limit
from pipetransformer.report.event_log import EVENT_LOG
from pipetransformer.runtime.groups import broadcast_from_rank0
from pipetransformer.training.resume import Checkpoint, cut_log, find_checkpoint

if TYPE_CHECKING:
    from pipetransformer.training.trainer import Trainer


class RunGuard:
    """The guard of one rank's training loop. Every rank makes the same calls.

    Args:
        trainer: The loop, whose state holds the guard's memory.
        run_dir: The run folder.
    """

    def __init__(self, trainer: Trainer, run_dir: Path) -> None:
        self._trainer, self._run_dir = trainer, run_dir
        self._options, self._max_fall = trainer.config.guard, trainer.config.freeze.guard

    @property
    def max_norm(self) -> float:
        """Largest gradient norm that the next step may have."""
        return norm_limit(self._options, self._trainer.state.guard)

    def judge_step(self, error: StepRefused, rate: float) -> Verdict:
        """Decides on a step that was refused. Collective.

        Raises:
            Diverged: The run ends.
        """
        state, is_not_finite = self._trainer.state, isinstance(error, NotFinite)
        action = self._options.not_finite if is_not_finite else self._options.exploding
        problem = broadcast_from_rank0(self._problem(error))  # idle ranks know none
        verdict = judge_step(self._options, state.guard, action, problem)
        if verdict.action == "stop":
            skip = f", or take guard.{'not_finite' if is_not_finite else 'exploding'}=skip" * (action == "stop")
            kept = "The weights of the step before are kept"
            raise Diverged(f"step {state.step + 1}: {verdict.reason}. {kept}; {self._advice(rate)}{skip}")
        state.guard.num_skips += 1
        state.guard.num_skipped += 1
        return verdict

    def _problem(self, error: StepRefused) -> str:
        if isinstance(error, NotFinite):
            return str(error)
        ratio, mean = self._options.max_norm_ratio, self._trainer.state.guard.mean_norm
        return f"{error}, more than guard.max_norm_ratio={ratio:g} times the mean of the last steps, {mean:.4g}"

    def _advice(self, rate: float) -> str:
        precision = self._trainer.runtime.precision
        wider = ", take precision=bfloat16, whose range is wider," if precision.scales_loss else ""
        peak = self._trainer.components.optim.peak
        now = "" if rate == peak else f" ({rate:g} in this step)"
        return f"lower optim.lr={peak:g}{now}{wider} or check the data"

    def follow(self, verdict: Verdict) -> None:
        """Reports a refused step, which counts as done, and rolls the weights back where the verdict says so."""
        frozen = self._trainer.state.num_frozen
        if verdict.action != "roll_back":
            self._report(verdict, frozen, frozen)
            return
        checkpoint = self._find(None)
        if checkpoint is None:
            step = self._trainer.state.step
            raise Diverged(
                f"step {step}: {verdict.reason}, but there is no checkpoint yet; take skip, or lower optim.lr"
            )
        trainer, state, manifest = self._trainer, self._trainer.state, checkpoint.manifest
        verdict = replace(verdict, reason=f"{verdict.reason} to those of step {manifest.step:,}")
        state.guard.num_rollbacks += 1
        if state.guard.watched is not None and state.guard.watched.step >= manifest.step:
            state.guard.watched = None  # that freeze is undone
        back = state.rolled_back(manifest.train, repeats=False)
        if not (trainer.config.freeze.is_static or state.guard.holds):
            # the checkpoint may be from before the decision at its own step
            passed = (step for step in range(manifest.step, state.step) if step != back["decided_at"])
            back["decision_due"] |= any(map(trainer.timeline.is_decision_step, passed))
        back["evaluation_due"] |= trainer.evaluations.is_due(state.step)  # a run that is stopped at once makes it
        self._report(verdict, frozen, back["num_frozen"])
        self._go_to(checkpoint, back, verdict)

    def watch(self) -> None:
        """Remembers the metric and keeps a checkpoint before a freeze, for :meth:`judge_freeze`. Collective."""
        trainer, state = self._trainer, self._trainer.state
        if self._max_fall is None or state.guard.watched is not None:
            return
        if not state.metrics:
            trainer.evaluations.run_or_leave()
        metric = trainer.main_metric.value
        if metric is None or not math.isfinite(metric):
            return
        state.guard.watched = Watched(state.step, state.num_frozen, metric, dict(state.policy_state))
        if self._options.freeze == "roll_back" and trainer.checkpoints.saved_step != state.step:
            trainer.flush_log()  # the log is cut to what it holds now
            trainer.checkpoints.save(state)

    def judge_freeze(self) -> bool:
        """Judges the watched freeze by the evaluation that has just ended. Collective.

        Returns:
            True where the run has been rolled back.

        Raises:
            FreezeHurts: The run ends.
        """
        trainer, state = self._trainer, self._trainer.state
        watched, metric = state.guard.watched, trainer.main_metric.value
        if self._max_fall is None or watched is None or metric is None:
            return False
        if state.num_frozen <= watched.num_frozen:  # the policy has unfrozen by itself
            state.guard.watched = None
            return False
        verdict = judge_freeze(self._options, self._max_fall, state.guard, trainer.main_metric.name, metric)
        state.guard.watched = None
        if verdict is None:
            return False
        if verdict.action == "stop":
            raise FreezeHurts(
                f"{verdict.reason}; take a slower freeze=, or guard.freeze=roll_back to freeze later by itself"
            )
        if verdict.action == "hold":
            state.guard.holds = True
            self._report(verdict, state.num_frozen, state.num_frozen)
            return False
        checkpoint = self._find(watched.step) if verdict.action == "roll_back" else None
        if checkpoint is None:
            self._unfreeze(verdict, watched)
            return False
        self._repeat(checkpoint, verdict)
        return True

    def _unfreeze(self, verdict: Verdict, watched: Watched) -> None:
        """Unfreezes what the watched freeze and those after it have frozen; the weights stay."""
        trainer, state = self._trainer, self._trainer.state
        missing = "; the checkpoint before it is lost, so that its blocks are unfrozen as they are"
        reason = verdict.reason + missing * (verdict.action == "roll_back")
        before, state.num_frozen, state.policy_state = state.num_frozen, watched.num_frozen, watched.policy_state
        state.target.pause(state.num_frozen)
        trainer.signals.start_anew()  # frozen blocks have counted as zeros
        state.num_updates = 0
        state.guard.num_rollbacks += 1
        state.decided_at = state.step  # not frozen at this step again
        self._report(Verdict("unfreeze", reason, verdict.terms), before, state.num_frozen)
        if state.step < trainer.timeline.num_steps:
            trainer.follow(Decision(state.num_frozen, "guard", reason))

    def _repeat(self, checkpoint: Checkpoint, verdict: Verdict) -> None:
        """Trains the steps since the watched freeze again, without it."""
        trainer, state, manifest = self._trainer, self._trainer.state, checkpoint.manifest
        num_lost = state.step - manifest.step
        state.guard.num_rollbacks += 1
        state.guard.num_steps_lost += num_lost
        back = state.rolled_back(manifest.train, repeats=True)
        back |= {"decided_at": manifest.step, "decision_due": False}  # not frozen at this step again
        back["target"] = back["target"] | {"proposal": back["num_frozen"], "is_paused": True}
        trainer.flush_log()
        trainer.checkpoints.go_back_to(manifest.step)
        if dist.get_rank() == 0:
            cut_log(self._run_dir / EVENT_LOG, manifest.log_bytes, back_to=manifest.step)
        self._report(verdict, state.num_frozen, back["num_frozen"], num_lost)
        self._go_to(checkpoint, back, verdict)

    def _find(self, step: int | None) -> Checkpoint | None:
        """Returns the newest whole checkpoint, or that of a step; ``None`` where there is none. Collective."""
        self._trainer.checkpoints.wait()
        try:
            return find_checkpoint(self._run_dir, step)
        except UserError:  # all are damaged
            return None

    def _go_to(self, checkpoint: Checkpoint, state: dict[str, Any], verdict: Verdict) -> None:
        """Goes on with a state and a checkpoint's weights; the time of steps that are trained again is lost."""
        trainer = self._trainer
        layers = CheckpointLayers(checkpoint.folder, checkpoint.manifest, trainer.components.stack)

        def load() -> None:
            trainer.runtime.load(*(layers.tensors() if dist.get_rank() == 0 else ({}, {})))

        trainer.go_to(state, load, verdict.reason)
        trainer.cache_again()
        trainer.checkpoints.save(trainer.state)

    def _report(self, verdict: Verdict, before: int, after: int, num_steps_rolled_back: int = 0) -> None:
        trainer = self._trainer
        trainer.flush_log()
        trainer.decisions.report(
            Decision(after, "guard", verdict.reason, verdict.terms),
            before,
            {},
            trainer.state.step - num_steps_rolled_back,
            num_steps_rolled_back=num_steps_rolled_back,
        )

    def figures(self) -> dict[str, int]:
        """Returns what the guard has done, for the summary; empty where it has done nothing."""
        guard = self._trainer.state.guard
        done = {name: getattr(guard, name) for name in ("num_skipped", "num_rollbacks", "num_steps_lost")}
        return done if any(done.values()) else {}

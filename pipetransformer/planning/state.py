"""The state of a run between two steps: everything a run has to know to go on, besides weights and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipetransformer.autopipe.plan import Plan
from pipetransformer.errors import UserError
from pipetransformer.planning.guard import GuardState
from pipetransformer.planning.history import RunHistory
from pipetransformer.planning.stopping import Patience
from pipetransformer.planning.target import TargetState

VERSION = 5


class Stateful(Protocol):
    """An object whose state is plain values, as torch's optimizers and schedulers have it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainState:
    """Counters and memory of a run. Every rank holds the same values.

    Random numbers need no state of their own: a stream is keyed by (seed, step, sample, layer), and the order of an
    epoch by (seed, epoch). So ``seed`` and ``step`` restore them.

    Attributes:
        seed: Seed of the run.
        history: Plans in force so far, with their steps and times.
        loss_scale: Loss scale of the runtime, shared with it.
        signals: What was measured since the last decision, shared with the collectors.
        steps_per_epoch: Optimizer steps of an epoch.
        step: Optimizer steps done so far; the index of the next one.
        policy_state: Memory of the freeze policy.
        num_decisions: Decisions taken so far.
        decided_at: Step before which the last decision was taken; -1 before the first.
        decision_due: A decision was put off because every step since the last one was skipped.
        num_updates: Steps since the last decision that changed the weights.
        metrics: Latest metrics of each evaluation split.
        evaluated_at: Step whose weights the main split was last scored with; ``None`` before the first time.
        num_frozen: Frozen prefix by the last decision. The plan follows in the transition after it.
        evaluation_due: The evaluation after the last step has begun and has not ended.
        overhead_s: Seconds of the last transition besides moving layers and filling the cache; the planner counts it.
        num_resumes: Times that the run went on from a checkpoint.
        num_steps_lost: Steps that were repeated for that, over all times.
        best_metrics: Best value so far of the main metric of each split: ``name``, ``value``, ``split``, ``step``.
        guard: Memory of the guard against numbers that go wrong.
        target: What the run has spent of the policy's target.
        patience: How long the run has waited for a new best, and whether it ends early.
    """

    seed: int
    history: RunHistory
    loss_scale: Stateful
    signals: Stateful
    steps_per_epoch: int
    step: int = 0
    policy_state: dict[str, Any] = field(default_factory=dict)
    num_decisions: int = 0
    decided_at: int = -1
    decision_due: bool = False
    num_updates: int = 0
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluated_at: int | None = None
    num_frozen: int = 0
    evaluation_due: bool = False
    overhead_s: float = 0.0
    num_resumes: int = 0
    num_steps_lost: int = 0
    best_metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    guard: GuardState = field(default_factory=GuardState)
    patience: Patience = field(default_factory=Patience)
    target: TargetState = field(default_factory=TargetState)

    @property
    def epoch(self) -> int:
        """Epoch of the next step, 0-based."""
        return self.step // self.steps_per_epoch

    @property
    def step_in_epoch(self) -> int:
        """Place of the next step in its epoch, 0-based."""
        return self.step % self.steps_per_epoch

    @property
    def plan(self) -> Plan:
        """Plan in force, with the frozen prefix and the cache level."""
        return self.history.entries[-1].plan

    def count_decision(self, num_frozen: int, policy_state: dict[str, Any]) -> None:
        """Takes over a decision of the freeze policy."""
        self.num_updates, self.decision_due = 0, False
        self.num_decisions += 1
        self.decided_at = self.step
        self.num_frozen, self.policy_state = num_frozen, policy_state

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can hold without loss."""
        return {
            "version": VERSION,
            "seed": self.seed,
            "step": self.step,
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "steps_per_epoch": self.steps_per_epoch,
            "policy_state": dict(self.policy_state),
            "num_decisions": self.num_decisions,
            "decided_at": self.decided_at,
            "decision_due": self.decision_due,
            "num_updates": self.num_updates,
            "num_frozen": self.num_frozen,
            "evaluation_due": self.evaluation_due,
            "overhead_s": self.overhead_s,
            "num_resumes": self.num_resumes,
            "num_steps_lost": self.num_steps_lost,
            "metrics": {split: dict(values) for split, values in self.metrics.items()},
            "evaluated_at": self.evaluated_at,
            "best_metrics": {split: dict(best) for split, best in self.best_metrics.items()},
            "loss_scale": self.loss_scale.state_dict(),
            "signals": self.signals.state_dict(),
            "guard": self.guard.state_dict(),
            "patience": self.patience.state_dict(),
            "target": self.target.state_dict(),
            "history": self.history.state_dict(),
            "cache_level": self.plan.cache_level if self.history.entries else 0,
        }

    def rolled_back(self, earlier: Mapping[str, Any], repeats: bool) -> dict[str, Any]:
        """Returns the state with which the run goes on from the weights of an earlier step.

        The memory of the guard and what counts restarts are not taken back.

        Args:
            earlier: :meth:`state_dict` of that step.
            repeats: The steps since are trained again; otherwise they count as done, and their batches are passed over.
        """
        kept = {"guard", "num_resumes", "num_steps_lost", "overhead_s"}
        if not repeats:
            kept |= {"step", "epoch", "step_in_epoch", "evaluation_due", "metrics", "best_metrics", "patience"}
            kept |= {"history", "evaluated_at"}
        back = {**earlier, **{name: value for name, value in self.state_dict().items() if name in kept}}
        if not repeats:  # steps that count as done have cost what they cost
            back["target"] = earlier["target"] | {"spent": self.target.spent, "epochs": self.target.epochs}
        return back

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values of :meth:`state_dict`.

        Raises:
            UserError: The state is of another version, lacks a value, or its samples have another order.
        """
        if state.get("version") != VERSION:
            raise UserError(f"the state has version {state.get('version')}, and this release reads version {VERSION}")
        try:
            self._load(state)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
            raise UserError(f"the state lacks what a run has ({type(error).__name__}: {error})") from error

    def _load(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise UserError(f"the state has seed={state['seed']}, and this run has seed={self.seed}; give them alike")
        length = state.get("steps_per_epoch", self.steps_per_epoch)  # states of earlier releases do not tell
        if length != self.steps_per_epoch:
            raise UserError(
                f"the state has {length} steps per epoch, and this run has {self.steps_per_epoch}; give the same data "
                "and batch_size"
            )
        if (state["epoch"], state["step_in_epoch"]) != divmod(state["step"], self.steps_per_epoch):
            raise UserError(
                f"step {state['step']} is step {state['step_in_epoch']} of epoch {state['epoch']} in the state, and "
                f"this run has {self.steps_per_epoch} steps per epoch; give the same data and batch_size"
            )
        plain = "step", "num_decisions", "decided_at", "decision_due", "num_updates", "num_frozen", "evaluation_due"
        for name in (*plain, "overhead_s", "num_resumes", "num_steps_lost"):
            setattr(self, name, state[name])
        self.policy_state = dict(state["policy_state"])
        self.metrics = {split: dict(values) for split, values in state["metrics"].items()}
        self.evaluated_at = state.get("evaluated_at")  # checkpoints of earlier releases do not tell
        self.best_metrics = {split: dict(best) for split, best in state["best_metrics"].items()}
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.signals.load_state_dict(state["signals"])
        self.guard = GuardState.from_dict(state["guard"])
        self.patience = Patience.from_dict(state["patience"])
        self.target = TargetState.from_dict(state["target"])
        self.history.load_state_dict(state["history"])

"""The guard of a run: what follows when a loss, a gradient or a freeze goes wrong. Pure.

::

    loss or gradient not finite ──► guard.not_finite ─┐
    norm > max_norm_ratio x mean ─► guard.exploding ──┼──► stop · skip the update · roll the weights back
    metric fell after a freeze ───► guard.freeze ─────┴──► stop · unfreeze · roll the run back, and freeze later
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipetransformer.config.sections import Guard
from pipetransformer.freeze.common import NOISE
from pipetransformer.metric import sign_of

NUM_WARMUP_NORMS = 10  # steps without an upper bound: the first norms tell little of those that come
MEAN_STEPS = 50  # the mean norm is over about as many steps


@dataclass(frozen=True)
class Watched:
    """A freeze that the next evaluation judges.

    Attributes:
        step: Optimizer steps before it; a checkpoint of this step is kept.
        num_frozen: Blocks that were frozen before it.
        metric: The main metric before it.
        policy_state: Memory of the freeze policy before it.
    """

    step: int
    num_frozen: int
    metric: float
    policy_state: dict[str, Any]


@dataclass
class GuardState:
    """Memory of the guard, a part of :class:`~pipetransformer.planning.state.TrainState`.

    Attributes:
        mean_norm: Running mean of the gradient norms of good steps.
        num_norms: Good steps so far.
        num_skips: Steps in a row without an update.
        num_skipped: Steps without an update in all.
        num_rollbacks: Times that the run was rolled back or unfrozen.
        num_steps_lost: Steps that were rolled back and trained again.
        holds: No further freeze is allowed.
        watched: The earliest freeze since the last evaluation.
    """

    mean_norm: float = 0.0
    num_norms: int = 0
    num_skips: int = 0
    num_skipped: int = 0
    num_rollbacks: int = 0
    num_steps_lost: int = 0
    holds: bool = False
    watched: Watched | None = None

    def add_norm(self, norm: float) -> None:
        """Counts a good step with its gradient norm before clipping."""
        self.num_norms += 1
        self.num_skips = 0
        self.mean_norm += (norm - self.mean_norm) / min(self.num_norms, MEAN_STEPS)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can hold without loss."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> GuardState:
        """Returns the state of :meth:`state_dict`."""
        known = cls(**state)
        known.watched = None if state["watched"] is None else Watched(**state["watched"])
        return known


@dataclass(frozen=True)
class Verdict:
    """An action of the guard, with the reason.

    Attributes:
        action: ``stop``, ``skip``, ``unfreeze``, ``roll_back``, or ``hold``: the frozen prefix stays as it is.
        reason: One sentence with the numbers.
        terms: The numbers by name.
    """

    action: str
    reason: str
    terms: dict[str, float] = field(default_factory=dict)


def norm_limit(options: Guard, state: GuardState) -> float:
    """Returns the largest gradient norm that the next step may have."""
    if options.max_norm_ratio is None or state.num_norms < NUM_WARMUP_NORMS:
        return math.inf
    return options.max_norm_ratio * state.mean_norm


def judge_step(options: Guard, state: GuardState, action: str, problem: str) -> Verdict:
    """Decides on a step whose loss or gradient cannot be used.

    Args:
        action: What the options ask for.
        problem: What is wrong with the step.
    """
    if action == "skip" and state.num_skips >= options.max_skips:
        reason = f"{problem}, after {state.num_skips} steps in a row whose update was skipped"
        return Verdict("stop", f"{reason} (guard.max_skips={options.max_skips})")
    if action == "roll_back" and state.num_rollbacks >= options.max_rollbacks:
        reason = f"{problem}, after {state.num_rollbacks} times that the weights were rolled back"
        return Verdict("stop", f"{reason} (guard.max_rollbacks={options.max_rollbacks})")
    done = {"skip": "; its update is skipped", "roll_back": "; the weights are rolled back"}
    return Verdict(action, problem + done.get(action, ""))


def judge_freeze(options: Guard, max_fall: float, state: GuardState, name: str, metric: float) -> Verdict | None:
    """Decides on the watched freeze at an evaluation; ``None`` where it did not hurt, or none is watched.

    Args:
        max_fall: ``freeze.guard``.
        name: Of the main metric.
        metric: Its value now.
    """
    watched = state.watched
    if watched is None or sign_of(name) * (metric - watched.metric) >= -(max_fall + NOISE):
        return None
    fell = "fell" if sign_of(name) > 0 else "rose"
    fell = f"{name} {fell} from {watched.metric:.4g} to {metric:.4g} after the freeze at step {watched.step:,}"
    terms = {"metric_before": watched.metric, "metric": metric, "allowed_fall": max_fall}
    if options.freeze != "stop" and state.num_rollbacks >= options.max_rollbacks:
        reason = f"{fell}, and guard.max_rollbacks={options.max_rollbacks} are used up; the frozen blocks stay"
        return Verdict("hold", reason, terms)
    done = {
        "stop": "",
        "unfreeze": "; its blocks are unfrozen",
        "roll_back": "; the run goes back to before it, and freezes one decision later",
    }
    return Verdict(options.freeze, f"{fell}, by more than freeze.guard={max_fall:g}{done[options.freeze]}", terms)

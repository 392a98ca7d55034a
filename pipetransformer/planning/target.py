"""Scales the decisions of a freeze policy to a mean frozen fraction, or to a time: rules are compared at equal cost.

The policy says when and how far; the target says how far at most and at least, before every step. What is left of the
target is spent over the rest of the run, ``need`` per unit of it::

    cost of a step with n blocks frozen
      c(0) ┬───────╮
           │       ╰── as the policy says, while  c(n) >= need                         cap: staying at n is enough
      need ┼ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─
           │           and at least so many that  c(n) / 4 + 3 c(L) / 4 <= need        floor: what freezing all blocks
      c(L) ┴────────────────────────────► end                                          over half of the rest spends

So a policy that asks for more is held where staying spends what is left, and goes on by a block as soon as that is too
much. One that asks for less is led, ever faster and then slower, to freezing all blocks at the end. Both end at the
target but for less than a step of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipetransformer.errors import UserError
from pipetransformer.freeze.base import Decision, FreezePolicy

FLOOR_WEIGHT = 1 / 4
"""Mean cost of freezing all blocks evenly over half of the rest: so much of c(n), and of c(L) the other part."""
TOLERANCE = 1e-9  # relative: of sums that are added up step by step


@dataclass(frozen=True)
class Progress:
    """How far a run has come before a step.

    Attributes:
        before: Fraction of the run before it, below 1.
        step: Fraction that it makes up.
        epochs: Length of the run.
    """

    before: float
    step: float
    epochs: int = 1


@dataclass
class TargetState:
    """Memory of a target, a part of :class:`~pipetransformer.planning.state.TrainState`.

    Attributes:
        spent: Cost of the run so far.
        proposal: The frozen prefix that the policy last asked for, or to which the target has led since.
        asked: The one that the policy last asked for.
        is_paused: The guard has unfrozen, and nothing freezes before the policy decides again.
        epochs: Length of the run of which ``spent`` is a part, where it is no time; it may go on with more epochs.
            0: nobody knows, as of checkpoints of earlier releases.
    """

    spent: float = 0.0
    proposal: int = 0
    is_paused: bool = False
    epochs: int = 0
    asked: int = 0

    def ask(self, num_frozen: int) -> None:
        """Takes over what the policy asks for."""
        self.proposal, self.asked, self.is_paused = num_frozen, num_frozen, False

    def take(self, held: int) -> None:
        """Takes over a prefix that was led to; the policy has not asked to unfreeze it."""
        self.proposal = max(self.proposal, held)

    def pause(self, num_frozen: int) -> None:
        """Takes over a prefix to which the guard went back."""
        self.proposal, self.is_paused = num_frozen, True

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can hold without loss."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> TargetState:
        """Returns the state of :meth:`state_dict`."""
        proposal, epochs = int(state["proposal"]), int(state.get("epochs", 0))
        asked = int(state.get("asked", proposal))  # which checkpoints of earlier releases do not have
        return cls(float(state["spent"]), proposal, bool(state["is_paused"]), epochs, asked)


@dataclass(frozen=True)
class Target:
    """The cost that a run is to have.

    Attributes:
        option: The option and its value, for messages.
        costs: Of the whole run with n blocks frozen, falling, shape (L + 1,): the fraction of blocks that train, or
            predicted seconds.
        total: What the run is to cost.
        in_seconds: Costs are seconds, to which transitions add.
    """

    option: str
    costs: tuple[float, ...]
    total: float
    in_seconds: bool = False

    @classmethod
    def of(
        cls, policy: FreezePolicy, num_blocks: int, step_seconds: Callable[[], Sequence[float]], num_steps: int,
        is_new: bool = True,
    ) -> Target | None:  # fmt: skip
        """Returns the target of a policy; ``None`` where it has none.

        Args:
            step_seconds: Returns the predicted seconds of a step with 0 to L blocks frozen.
            is_new: The run begins, and has to be able to meet it; one that goes on does what it can.

        Raises:
            UserError: No freezing, or all of it, would still miss the target.
        """
        if policy.is_static:
            return None
        if policy.target_fraction is not None:
            at_start = policy.frozen_at_start / num_blocks
            if policy.target_fraction < at_start:
                raise UserError(
                    f"freeze.target_fraction={policy.target_fraction} is less than the {at_start:.3g} that is frozen "
                    f"from the start ({policy.frozen_at_start} of {num_blocks} blocks)"
                )
            costs = tuple(1 - n / num_blocks for n in range(num_blocks + 1))
            return cls(f"freeze.target_fraction={policy.target_fraction:g}", costs, 1 - policy.target_fraction)
        if policy.target_seconds is None:
            return None
        costs = _falling([seconds * num_steps for seconds in step_seconds()])
        if is_new and not costs[-1] <= policy.target_seconds <= costs[0]:
            raise UserError(
                f"freeze.target_seconds={policy.target_seconds:g} is not between the {costs[-1]:.3g} s that the run is "
                f"predicted to take with all blocks frozen and the {costs[0]:.3g} s without freezing"
            )
        return cls(f"freeze.target_seconds={policy.target_seconds:g}", costs, policy.target_seconds, in_seconds=True)

    def at_speed(self, step_seconds: Callable[[], Sequence[float]], num_steps: int) -> Target:
        """Returns the target with its costs by what is known now of the seconds of a step; itself without seconds.

        Args:
            step_seconds, num_steps: As for :meth:`of`.
        """
        if not self.in_seconds:
            return self
        return replace(self, costs=_falling([seconds * num_steps for seconds in step_seconds()]))

    def begin(self, state: TargetState, num_frozen: int, num_steps: Mapping[int, int], done: Progress) -> None:
        """Counts what a run has spent that went without this kind of target so far.

        Args:
            num_frozen: Blocks frozen now.
            num_steps: Steps done with so many blocks frozen.
        """
        spent = sum(self.costs[n] * number for n, number in num_steps.items()) / max(1, sum(num_steps.values()))
        state.ask(num_frozen)
        state.spent, state.epochs = done.before * spent, done.epochs

    def spend(self, state: TargetState, num_frozen: int, run_seconds: float, done: Progress) -> None:
        """Counts a step.

        Args:
            num_frozen: Blocks frozen in it.
            run_seconds: What the whole run would take at its predicted speed.
        """
        cost = done.step * (run_seconds if self.in_seconds else self.costs[num_frozen])
        state.spent, state.epochs = self._spent(state, done) + cost, done.epochs

    def spend_transition(self, state: TargetState, seconds: float) -> None:
        """Counts a transition with its predicted seconds."""
        state.spent += seconds * self.in_seconds

    def _spent(self, state: TargetState, done: Progress) -> float:
        """Returns what the run has spent, as a part of one that is as long as it is now."""
        if self.in_seconds or state.epochs in (0, done.epochs):
            return state.spent
        return state.spent * state.epochs / done.epochs

    def need(self, state: TargetState, done: Progress) -> float:
        """Returns the mean cost of the rest of the run, in costs of a whole one.

        Args:
            done: How far the run has come.
        """
        return (self.total - self._spent(state, done)) / (1 - done.before)

    def shortfall(self, state: TargetState, done: Progress) -> str:
        """Returns what a run that goes on will come to at best; empty where it can still meet the target.

        A step of all blocks more or less is no miss.
        """
        spent, slack = self._spent(state, done), done.step * self.costs[0]
        least, most = (spent + (1 - done.before) * cost for cost in (self.costs[-1], self.costs[0]))
        if done.before >= 1 or least - slack <= self.total <= most + slack:
            return ""
        how, best = ("at least", least) if least > self.total else ("at most", most)
        if self.in_seconds:
            return (
                f"{self.option} will be missed: after {done.before:.0%} of the run it takes {how} {best:.3g} s in all"
            )
        how = "at most" if how == "at least" else "at least"  # the cost is what trains
        return f"{self.option} will be missed: after {done.before:.0%} of the run it can be {how} {1 - best:.3g}"

    def bounds(self, state: TargetState, done: Progress) -> tuple[int, int]:
        """Returns the fewest and the most blocks that may be frozen in the next step."""
        need, prefixes = self.need(state, done), range(len(self.costs))
        slack = TOLERANCE * self.costs[0]
        most = max((n for n in prefixes if self.costs[n] >= need - slack), default=0)
        reserve = (need - self.costs[-1]) * (1 - done.before)  # what there is besides the rest with all blocks frozen
        led = [FLOOR_WEIGHT * cost + (1 - FLOOR_WEIGHT) * self.costs[-1] for cost in self.costs]
        steps = [(cost - self.costs[-1]) * done.step for cost in self.costs]
        fits = (n for n in prefixes if led[n] <= need + slack and steps[n] <= reserve + slack)
        fewest = min(fits, default=prefixes[-1])
        return min(fewest, most), most

    def held(self, state: TargetState, done: Progress, num_frozen: int) -> int:
        """Returns the frozen prefix that the target makes of the policy's last proposal.

        What is frozen stays frozen, unless the policy itself asks for less.
        """
        fewest, most = self.bounds(state, done)
        return max(min(max(state.proposal, fewest), most), min(num_frozen, max(state.proposal, fewest)))

    def scaled(self, decision: Decision, state: TargetState, done: Progress, num_frozen: int) -> Decision:
        """Returns a decision of the policy as the target lets it stand; ``state`` has its proposal.

        Args:
            num_frozen: Blocks frozen before it.
        """
        held = self.held(state, done, num_frozen)
        terms = decision.terms | {"proposed": float(decision.num_frozen), "allowed": float(held)}
        if held == decision.num_frozen:
            return replace(decision, terms=terms)
        limit = "at most" if held < decision.num_frozen else "at least"
        return Decision(held, "target", f"{self._reason(limit, held, state, done)}; {decision.reason}", terms)

    def decision(self, state: TargetState, done: Progress, num_frozen: int) -> Decision | None:
        """Returns a decision between those of the policy; ``None`` where the prefix stays."""
        held = self.held(state, done, num_frozen)
        if held == num_frozen:
            return None
        limit = "at least" if held > state.proposal else "by now"
        asked = f"the policy last asked for {state.asked}"
        return Decision(held, "target", f"{self._reason(limit, held, state, done)}; {asked}", {"allowed": float(held)})

    def _reason(self, limit: str, held: int, state: TargetState, done: Progress) -> str:
        allowed = min(held, self.bounds(state, done)[1]) if limit == "at most" else held
        blocks = "1 block" if allowed == 1 else f"{allowed} blocks"
        stay = f", and the {held} that are frozen stay so" if allowed < held else ""
        total = f"{self.total:.3g} s" if self.in_seconds else f"the {self.total:.3g} in which blocks may train"
        spent = f"{self._spent(state, done):.3g} of {total} are spent after {done.before:.0%} of the run"
        return f"{self.option} allows {limit} {blocks}{stay}, as {spent}"


def _falling(costs: Sequence[float]) -> tuple[float, ...]:
    """Returns the least cost with at most so many blocks frozen."""
    least = list(costs)
    for n in range(1, len(least)):
        least[n] = min(least[n], least[n - 1])
    return tuple(least)

"""Whether a transition pays: what it saves over the rest of the run, against what it takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipetransformer.autopipe.plan import Plan


@dataclass(frozen=True)
class TransitionOption:
    """A plan to go to, and the seconds until its first step can start."""

    plan: Plan
    cost_s: float


@dataclass(frozen=True)
class TransitionChoice:
    """Where to go.

    Attributes:
        plan: The plan to go to.
        gain_s: What it saves over the rest of the run against staying, in seconds; 0 where it stays.
        cost_s: What going there takes; 0 where it stays.
        reason: One sentence with the numbers, for the log.
    """

    plan: Plan
    gain_s: float
    cost_s: float
    reason: str


def choose_transition(stay: Plan | None, options: Sequence[TransitionOption], num_steps_left: int) -> TransitionChoice:
    """The plan with which the run ends soonest, counting what it takes to go there.

    Args:
        stay: The arrangement of now, at no cost; ``None`` where it cannot stay.
        options: Other arrangements, the preferred one first; empty only where it can stay.
        num_steps_left: Steps until the run ends.
    """
    if not options:
        assert stay is not None
        return TransitionChoice(stay, 0.0, 0.0, "no other arrangement is faster")
    best = min(options, key=lambda option: option.cost_s + num_steps_left * option.plan.predicted_step_s)
    if stay is None:
        return TransitionChoice(
            best.plan, 0.0, best.cost_s, "the arrangement cannot stay: frozen layers thaw or leave the cache"
        )
    gain_s = (stay.predicted_step_s - best.plan.predicted_step_s) * num_steps_left
    pays = gain_s > best.cost_s
    reason = (
        f"{num_steps_left} steps of {stay.predicted_step_s:.4g} s would take {best.plan.predicted_step_s:.4g} s each: "
        f"{abs(gain_s):.3g} s {'less' if gain_s >= 0 else 'more'}, {'more' if pays else 'no more'} than the "
        f"{best.cost_s:.3g} s of the transition"
    )
    return (
        TransitionChoice(best.plan, gain_s, best.cost_s, reason)
        if pays
        else TransitionChoice(stay, 0.0, 0.0, f"it stays: {reason}")
    )

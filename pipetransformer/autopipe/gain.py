"""Whether a transition pays: what it saves over the rest of the run, against what it takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gain:
    """A decision on a transition.

    Attributes:
        gain_s: Saved over the rest of the run, without the transition itself; negative for a slower plan.
        cost_s: The transition.
        pays: The gain is larger than the cost.
        reason: One sentence with the numbers, for the log.
    """

    gain_s: float
    cost_s: float
    pays: bool
    reason: str


def gain(step_s: float, next_step_s: float, num_steps_left: int, transition_s: float) -> Gain:
    """What going to the next plan is predicted to gain.

    Args:
        step_s: One step if everything stays as it is, in seconds.
        next_step_s: One step after the transition.
        num_steps_left: Steps until the run ends.
        transition_s: Until the first step of the next plan can start.
    """
    gain_s = (step_s - next_step_s) * num_steps_left
    pays = gain_s > transition_s
    verdict = "more than" if pays else "no more than"
    reason = (
        f"{num_steps_left} steps of {step_s:.4g} s would take {next_step_s:.4g} s each: {gain_s:.3g} s less, "
        f"{verdict} the {transition_s:.3g} s of the transition"
    )
    return Gain(gain_s, transition_s, pays, reason)

"""Learning rates after the warm-up, as fractions of the peak. Pure functions of the step, so they survive everything.

The names and formulas are those of ``transformers.get_scheduler``, and ``step`` is torch's ``MultiStepLR``. The first
ones depend on the progress of the run alone, from 0 at the end of the warm-up to 1 at the end, and ``step`` on the part
of the whole run that is done::

    linear, cosine, polynomial    from 1 down to ``final_fraction``
    constant                      1
    inverse_sqrt                  1 / sqrt(s / t), s steps from the start, t of warm-up, or 10,000 without
    step                          times ``gamma`` after each of the ``milestones``
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

SCHEDULES = ("linear", "cosine", "constant", "polynomial", "inverse_sqrt", "step")
REFERENCE_WIDTH = 768  # of the models that recipes are written for
WIDEST, NARROWEST = 0.5, 8.0  # factors of a recipe's rate, at most
TIMESCALE = 10_000  # steps of inverse_sqrt without warm-up, as in transformers


def falling(schedule: str, progress: float, final_fraction: float, power: float) -> float:
    """Computes the fraction of the peak for the schedules that fall from it to ``final_fraction``.

    Args:
        schedule: ``linear``, ``cosine`` or ``polynomial``.
        progress: Of the run after its warm-up, from 0 to 1.
        final_fraction: At the end of the run.
        power: Of ``polynomial``.
    """
    if schedule == "cosine":
        left = (1 + math.cos(math.pi * progress)) / 2
    else:
        left = (1 - progress) ** (power if schedule == "polynomial" else 1.0)
    return final_fraction + (1 - final_fraction) * left


def inverse_sqrt(step: int, num_warmup: int) -> float:
    """Computes the fraction of the peak at a step, from 0 on, at or after the warm-up."""
    timescale = num_warmup or TIMESCALE
    return 1 / math.sqrt((step + timescale - num_warmup) / timescale)


def steps_down(progress: float, milestones: Sequence[float], gamma: float) -> float:
    """Computes the fraction of the peak after the milestones that have passed.

    Args:
        progress: Of the whole run, from 0 to 1.
        milestones: Fractions of the run, ascending.
        gamma: Factor at each.
    """
    return gamma ** bisect_right(milestones, progress)


def by_width(rate: float, width: int) -> float:
    """Scales the peak rate of a recipe to a model of another width, by the square of the widths' ratio.

    The recipes of the field lie at 1e-5 for models of width 1,024 and above, at 2e-5 to 5e-5 for BERT-base, and at 1e-4
    for MiniLM of width 384; ``experiments/recipes`` has what was measured.
    """
    return rate * min(max((REFERENCE_WIDTH / width) ** 2, WIDEST), NARROWEST)

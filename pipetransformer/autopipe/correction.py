"""Corrections of predictions by the first steps of plans: a line from predicted to measured seconds."""

from __future__ import annotations

from functools import lru_cache
from statistics import geometric_mean
from typing import Literal, NamedTuple

LayoutKind = Literal["single", "data", "pipeline", "hybrid", "sharded", "mesh"]
"""Layouts whose predictions err alike: one device, replicas of one, a pipeline, replicas of pipelines, FSDP, meshes."""


class TimedPlan(NamedTuple):
    """The first steps of a plan beside their prediction.

    Attributes:
        kind, num_frozen, cache_level: Of the plan.
        predicted_s: Seconds of a step without any correction.
        measured_s: Seconds that a step took.
    """

    kind: LayoutKind
    num_frozen: int
    cache_level: int
    predicted_s: float
    measured_s: float


class Correction(NamedTuple):
    """A line from predicted to measured seconds of a step."""

    factor: float
    extra_s: float


NO_CORRECTION = Correction(1.0, 0.0)
EXTRA_S = 0.005  # error of a step's fixed part that is as likely as an error of the whole by a factor of 2
RIDGE, AGEING = 1e-6, 0.5


@lru_cache(maxsize=256)
def corrected_by(timed: tuple[TimedPlan, ...]) -> Correction:
    """Returns the line nearest to no correction that goes through what was measured of one kind of plan.

    One plan does not tell whether its layers are slower or whether the step has more of what no layer takes. So the
    line has the least ``(factor - 1)^2 + (extra_s / EXTRA_S)^2``: a short step is held to be longer by more seconds, a
    long one by a factor. Several plans tell both, by least squares of relative errors, the last one counting most.

    Plans that contradict each other, as on a machine that is busy at times, would give a line that falls. The factor is
    at least 1, or that of the plan which was overestimated most.

    Args:
        timed: The oldest first.
    """
    if not timed:
        return NO_CORRECTION
    rows = [(p.predicted_s / p.measured_s, EXTRA_S / p.measured_s, 1 - p.predicted_s / p.measured_s) for p in timed]
    weights = [AGEING**age for age in reversed(range(len(rows)))]
    xx, xy, yy, xr, yr = (
        sum(weight * row[i] * row[j] for weight, row in zip(weights, rows, strict=True))
        for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    ridge = RIDGE * (xx + yy)
    extra_s = max(0.0, EXTRA_S * ((xx + ridge) * yr - xy * xr) / ((xx + ridge) * (yy + ridge) - xy * xy))
    factor = 1 + (xr - xy * extra_s / EXTRA_S) / (xx + (ridge if extra_s else 0.0))
    least = min(1.0, *(p.measured_s / p.predicted_s for p in timed))
    if factor < least:
        factor, extra_s = least, max(0.0, EXTRA_S * (yr - (least - 1) * xy) / yy)
    return Correction(factor, extra_s)


def correction_for(kind: LayoutKind, is_cached: bool, timed: tuple[TimedPlan, ...]) -> Correction:
    """Returns the correction of the predictions for a kind of layout.

    Of its plans those that read a cache count alone where there are any, and so do those that read none: on one line
    that rises, a cached plan would stay faster than an uncached one whatever was measured.

    A kind that has not been timed takes what those that have been have in common: what slows all of them is the
    machine, or a disturbed profile. It is held for no slower than predicted otherwise, so that a kind that might be
    faster than all timed ones is tried.

    Args:
        is_cached: The plan reads a cache.
        timed: Plans that have been compared with their prediction, the oldest first.
    """
    own = tuple(plan for plan in timed if plan.kind == kind)
    if own or not timed:
        return corrected_by(tuple(plan for plan in own if (plan.cache_level > 0) == is_cached) or own)
    kinds = dict.fromkeys(plan.kind for plan in timed)
    known = [corrected_by(tuple(plan for plan in timed if plan.kind == each)) for each in kinds]
    factor = min(1.0, geometric_mean(each.factor for each in known))
    return Correction(factor, min(each.extra_s for each in known))

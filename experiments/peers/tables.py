"""The table of a workload, and what it may be read for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from experiments.record import markdown, share
from pipetransformer.report.comparison import half_width, with_interval

FULL, HALF, TRAINER = "ours, parallel=data", "ours, parallel=data, half the epochs", "HF Trainer"
FEWEST_SEEDS = 3
HEADER = (
    "arm", "main metric", "command, s", "CPU, s", "after loading, s", "times best static", "times HF Trainer",
    "share of the limit",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A run of an arm.

    Attributes:
        seconds: Of the command, start-up and evaluations included.
        cpu_seconds: Of all its processes.
        loop_seconds: From where data and model are there to the last evaluation.
        is_static: It does not freeze, and trains the full schedule; without freezing our elastic run is one of them.
        freezes: Steps before which a prefix froze, with its blocks.
        share_of_limit: Of our runs that are none of the static plans, see :mod:`pipetransformer.autopipe.limit`.
    """

    arm: str
    seed: int
    metric: float
    seconds: float
    cpu_seconds: float
    loop_seconds: float
    is_static: bool
    freezes: list[tuple[int, int]] = field(default_factory=list)
    share_of_limit: float | None = None


Figure = Callable[[Result], float]
FIGURES: tuple[Figure, ...] = (lambda one: one.seconds, lambda one: one.cpu_seconds, lambda one: one.loop_seconds)


def table(results: Sequence[Result]) -> str:
    """Returns a row for each arm, and the line that says what the workload can show."""
    arms = dict.fromkeys(result.arm for result in results)
    rows = [_row(arm, results) for arm in arms]
    return markdown(HEADER, rows) + f"\n\nCan carry a claim about accuracy: {verdict(results)}"


def _row(arm: str, results: Sequence[Result]) -> tuple[str, ...]:
    own = [result for result in results if result.arm == arm]
    static, trainer = _static(results), [one for one in results if one.arm == TRAINER]
    ratios = (" · ".join(_ratio(own, others, figure) for figure in FIGURES) for others in (static, trainer))
    seconds = (f"{median(figure(one) for one in own):.0f}" for figure in FIGURES)
    reached = share(one.share_of_limit for one in own)
    return (arm, with_interval([one.metric for one in own]), *seconds, *ratios, reached)


def _static(results: Sequence[Result]) -> list[Result]:
    """Returns the static arms of the seeds with which all of them ran: the best of a few is not the best of all."""
    static = [one for one in results if one.is_static]
    num_arms = len({one.arm for one in static})
    counts = Counter(one.seed for one in static)
    return [one for one in static if counts[one.seed] == num_arms]


def _ratio(own: Sequence[Result], others: Sequence[Result], figure: Figure) -> str:
    """Returns the best of the others over an arm's own: the median of the ratios within each seed."""
    ratios = []
    for one in own:
        beside = [figure(other) for other in others if other.seed == one.seed]
        if beside:
            ratios.append(min(beside) / figure(one))
    return f"{median(ratios):.2f}" if ratios else "-"


def verdict(results: Sequence[Result]) -> str:
    """Returns whether the full schedule is better than half of it, both without freezing, beyond what seeds differ by.

    Where it is not, half the steps do as well, and an arm that freezes loses nothing that could be lost.
    """
    full, half = ({one.seed: one.metric for one in results if one.arm == arm} for arm in (FULL, HALF))
    gains = [full[seed] - half[seed] for seed in full if seed in half]
    if len(gains) < FEWEST_SEEDS:
        return f"unknown; {len(gains)} of at least {FEWEST_SEEDS} seeds have run"
    width = half_width(gains)
    assert width is not None
    answer = "yes" if mean(gains) > width else "no"
    return f"{answer}; the full schedule gains {mean(gains):+.4f} ± {width:.4f} over half of it"

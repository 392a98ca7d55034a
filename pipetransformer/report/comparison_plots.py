"""Figures of several runs side by side, a line or a bar for each arm.

Each function returns a new figure, or ``None`` where no run has something to show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipetransformer.report.comparison import Arm, half_width, repeats, share_interval
from pipetransformer.report.format import num_devices, two_digits
from pipetransformer.report.run_folder import Run
from pipetransformer.report.style import (
    COLOURS,
    STEP_LABEL,
    Look,
    all_shortened,
    legend_below,
    looks,
    new_figure,
    new_panels,
    new_row,
    whole_numbers,
)

MIB = 2**20
SHARES = ("accuracy",)
"""Metrics that are a share of the samples, so that their number gives an interval."""


def metric_over_time(arms: Sequence[Arm]) -> Figure | None:
    """Draws the main metric over the seconds of training, transitions and fills included, not evaluations.

    At each step the mean of the runs that evaluated there, where there are several with a band for its interval
    (:func:`~comparison.half_width`). Of a single run, a share such as accuracy has bars for the interval that its
    number of samples gives (:func:`~comparison.share_interval`). An arm without evaluations is in the legend alone.
    """
    name, split = _main_metric(arms)
    if not name:
        return None
    figure, axes = new_figure("Result over time", "training time, s", f"{split} {name}".strip(), height=4.6)
    for arm, look in looks(arms):
        _draw_metric(axes, arm, look, split, name)
    if len(arms) > 1:
        legend_below(axes, num_columns=2)
    return figure


def _draw_metric(axes: Axes, arm: Arm, look: Look, split: str, name: str) -> None:
    points = ([dict(_points(run, split, name)) for run in runs] for runs in repeats(arm.started))
    seeds = [[own for own in runs if own] for runs in points if any(runs)]
    style = {"color": look.colour, "linestyle": look.style, "marker": look.marker}
    if not seeds:
        axes.plot([], [], **style, label=f"{arm.name}: no {split} {name}")
        return
    drawn = list(chain.from_iterable(seeds))
    found = [_found_at(step, seeds) for step in sorted(set().union(*drawn))]
    seconds, values, _ = np.array([own.mean(0) for own in found]).T
    axes.plot(seconds, values, **style, label=_label(arm, len(drawn)))
    low, high = np.array([_interval(own, name in SHARES, len(seeds)) for own in found]).T
    if len(seeds) > 1:
        axes.fill_between(seconds, low, high, color=look.colour, alpha=0.15)
    if (low < high).any():
        errors = [values - low, high - values]
        axes.errorbar(seconds, values, errors, fmt="none", ecolor=look.colour, elinewidth=1, capsize=3)


def _found_at(step: int, seeds: Sequence[Sequence[Mapping[int, Sequence[float]]]]) -> np.ndarray:
    """Returns seconds, metric and number of samples of each seed that was evaluated at a step, (seeds, 3).

    Args:
        seeds: What the runs of each found, by step; repeats of a seed count by their mean.
    """
    found = ([own[step] for own in runs if step in own] for runs in seeds)
    return np.array([np.mean(own, 0) for own in found if own])


def _interval(found: np.ndarray, is_share: bool, num_seeds: int) -> tuple[float, float]:
    """Returns the ends of the interval of the seeds' mean at a step; NaN where one of several is left, which has none.

    Args:
        found: Of each seed that was evaluated there the seconds, the metric and the number of samples, (seeds, 3).
        is_share: The metric is a share of the samples, and that of a single seed has their interval.
        num_seeds: That are drawn.
    """
    values, mean = found[:, 1], float(found[:, 1].mean())
    if len(found) == 1 < num_seeds:
        return np.nan, np.nan
    if num_seeds == 1 and is_share and 0 <= mean <= 1:  # not in percent
        return share_interval(mean, int(found[0, 2]))
    half = half_width(values.tolist()) or 0.0
    return mean - half, mean + half


def _label(arm: Arm, num_drawn: int) -> str:
    num_runs = len(arm.runs)
    if num_runs == 1:
        return arm.name
    return f"{arm.name} ({num_runs} runs)" if num_drawn == num_runs else f"{arm.name} ({num_drawn} of {num_runs} runs)"


def plans_over_steps(arms: Sequence[Arm]) -> Figure | None:
    """Draws frozen blocks, stages, replicas and idle devices over the steps, of each arm's first run."""
    shown = [arm for arm in arms if arm.started]
    if not shown:
        return None
    labels = ["frozen part\nof the blocks", "stages of\na replica", "replicas", "idle devices"]
    figure, panels = new_panels("Plans (first run of each arm)", STEP_LABEL, labels, 6.8)
    for number, (arm, look) in enumerate(looks(shown)):
        run, width = arm.started[0], max(1.4, 4.5 - number)  # equal numbers lie on each other
        plans, edges = _plans(run)
        numbers = [
            (
                plan["num_frozen"] / run.start["num_blocks"],
                len(plan["stages"]),
                plan["num_replicas"],
                plan["world_size"] - num_devices(plan),
            )
            for plan in plans
        ]
        style = {"color": look.colour, "linestyle": look.style, "linewidth": width, "label": arm.name}
        for axes, values in zip(panels, zip(*numbers, strict=True), strict=True):
            axes.stairs(values, edges, baseline=None, **style)
    for axes in panels[1:]:
        axes.set_ylim(-0.2, max(1.0, axes.get_ylim()[1]) + 0.4)  # also where all are 0
        whole_numbers(axes, x=True, y=True)
    panels[0].set_ylim(-0.05, 1.05)
    legend_below(panels[0], num_columns=2)
    return figure


def gain(arms: Sequence[Arm]) -> Figure | None:
    """Draws speed-up, its limit as a mark, and the share of the limit that each arm reached; a mark for each run.

    Runs that were the best static plan from start to end have neither.
    """
    labels = ["speed-up over the best static plan, times", "share of the limit, %"]
    if not any(arm.gains("speedup_vs_static") for arm in arms):
        return None
    figure, (speed, share) = new_row("Speed-up and share of the limit", labels, len(arms))
    _bars(speed, arms, [arm.gains("speedup_vs_static") for arm in arms])
    _bars(share, arms, [[100 * value for value in arm.gains("share_of_limit")] for arm in arms])
    limits = [(np.mean(arm.gains("limit")), row) for row, arm in enumerate(arms) if arm.gains("limit")]
    if limits:
        style = {"marker": "|", "markersize": 20, "markeredgewidth": 2.5, "color": COLOURS[5]}
        speed.plot(*np.array(limits).T, linestyle="", label="limit", **style)
        speed.set_xlim(right=max(speed.get_xlim()[1], 1.1 * float(max(limit for limit, _ in limits))))
    speed.axvline(1, color="black", linestyle=":", label="best static plan")
    share.axvline(100, color="black", linestyle=":")
    legend_below(speed)
    return figure


def cache(arms: Sequence[Arm]) -> Figure | None:
    """Draws hits, stored bytes and waiting of the cache, a bar for each arm and a mark for each run."""
    shown = [arm for arm in arms if arm.figures("cache", "wait_seconds")]
    if not shown:
        return None
    figure, (hits, stored, waited) = new_row("Cache", ["hits, %", "stored, MiB", "waited for it, s"], len(shown))
    _bars(hits, shown, [[100 * value for value in arm.figures("cache", "hit_rate")] for arm in shown])
    _bars(stored, shown, [[size / MIB for size in arm.stored_bytes()] for arm in shown])
    _bars(waited, shown, [arm.figures("cache", "wait_seconds") for arm in shown])
    return figure


def _bars(axes: Axes, arms: Sequence[Arm], values: Sequence[Sequence[float]]) -> None:
    """Draws the mean of each arm as a bar with its number, and where there are several values a mark for each."""
    for row, own in enumerate(values):
        if own:
            axes.barh(row, np.mean(own), color=COLOURS[4], height=0.6)
            style = {"va": "center", "fontsize": 9}
            axes.annotate(two_digits(float(np.mean(own))), (0, row), xytext=(4, 0), textcoords="offset points", **style)
        if len(own) > 1:
            axes.plot(own, [row] * len(own), linestyle="", marker="|", markersize=14, color="black")
    highest = max((value for own in values for value in own), default=0.0)
    axes.set_xlim(0, 1.1 * highest or 1.0)
    axes.set_yticks(range(len(arms)), all_shortened([arm.name for arm in arms]))


def _main_metric(arms: Sequence[Arm]) -> tuple[str, str]:
    """Returns name and split of the main metric of most arms, the first of several; empty where nothing is evaluated.

    That of an arm is that of its first run which has come to an evaluation.
    """
    found = [next(filter(None, map(_metric_of, arm.runs)), None) for arm in arms]
    counts = Counter(each for each in found if each)
    return max(counts, key=lambda each: counts[each], default=("", ""))  # counted in the order of the arms


def _metric_of(run: Run) -> tuple[str, str] | None:
    """Returns name and split of a run's main metric, as far as it has come."""
    if metric := run.summary.get("metric"):
        return metric["name"], metric["split"]
    wanted = run.start.get("main_metric", {}) if run.has_started else {}
    for event in run.events["evaluate"]:
        if wanted.get("split") in (None, event["split"]):
            return wanted.get("name") or next(iter(event["metrics"])), event["split"]
    return None


def _points(run: Run, split: str, name: str) -> Iterator[tuple[int, tuple[float, float, int]]]:
    """Yields for each evaluated step its seconds of training, its metric and its number of samples."""
    for event in run.events["evaluate"]:
        value = event["metrics"].get(name)
        if event["split"] == split and value is not None:
            yield event["step"], (seconds_until(run, event["step"]), value, event.get("num_samples", 0))


def seconds_until(run: Run, step: int) -> float:
    """Returns the seconds of training up to a step: its steps, and the transitions before them."""
    steps = sum(event["step_seconds"] for event in run.events["step"] if event["step"] <= step)
    return steps + sum(event["seconds"] for event in run.events["transition"] if event["step"] < step)


def _plans(run: Run) -> tuple[list[dict], list[int]]:
    """Returns the plans of a run, and the edges of each over the steps."""
    plans = dict(run.plans)  # the last of each step
    last = max((event["step"] for event in run.events["step"]), default=0)
    return [*plans.values()], [*plans, max(last, [*plans][-1] + 1)]

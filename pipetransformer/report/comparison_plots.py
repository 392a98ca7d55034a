"""Figures of several runs side by side, a line for each arm. Each function returns a new figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipetransformer.report.comparison import Arm, half_width
from pipetransformer.report.plots import COLOURS, STEP_LABEL
from pipetransformer.report.run_folder import Run

STYLES = ("-", "--", "-.", ":")
"""Arms differ in them too, so that a grey print can be read."""


def metric_over_time(arms: Sequence[Arm]) -> Figure:
    """Draws the main metric over the seconds of training, transitions and fills included, not evaluations.

    Of several runs the mean, with a band for its interval (see :func:`~comparison.half_width`).
    """
    name, split = _main_metric(arms)
    figure, axes = _figure("Result over time", "training, s", f"{split} {name}".strip())
    for arm, colour, style in _looks(arms):
        means, widths = _evaluations(arm, split, name)
        if not len(means):
            continue
        axes.plot(*means.T, color=colour, linestyle=style, marker="o", label=arm.name)
        axes.fill_between(means[:, 0], means[:, 1] - widths, means[:, 1] + widths, color=colour, alpha=0.15)
    _legend(axes)
    return figure


def frozen_over_steps(arms: Sequence[Arm]) -> Figure:
    """Draws the frozen part of the blocks over the steps, of the first run of each arm."""
    figure, axes = _figure("Frozen blocks (first run of each arm)", STEP_LABEL, "part of the blocks")
    for arm, colour, style in _looks(arms):
        steps, frozen = _frozen(arm.runs[0])
        axes.stairs(frozen, steps, baseline=None, color=colour, linestyle=style, linewidth=2, label=arm.name)
    axes.set_ylim(-0.03, 1.03)
    _legend(axes)
    return figure


def share_of_limit(arms: Sequence[Arm]) -> Figure:
    """Draws the share of the limit that each arm reached; of several runs the mean, with a mark for each."""
    figure, axes = _figure("Share of the limit (predicted)", "share", "")
    figure.set_size_inches(9, 1.4 + 0.45 * len(arms))
    axes.invert_yaxis()  # the first arm on top
    for row, arm in enumerate(arms):
        shares = arm.figures("share_of_limit")
        if shares:
            axes.barh(row, np.mean(shares), color=COLOURS[0], height=0.6)
            axes.plot(shares, [row] * len(shares), linestyle="", marker="|", markersize=14, color="black")
    axes.axvline(1, color="black", linestyle=":")
    axes.set_yticks(range(len(arms)), [arm.name for arm in arms])
    axes.set_xlim(left=0)
    return figure


def _main_metric(arms: Sequence[Arm]) -> tuple[str, str]:
    """Returns name and split of the first main metric that there is."""
    metrics = (run.summary["metric"] for arm in arms for run in arm.runs if run.summary.get("metric"))
    evaluated = (event for arm in arms for run in arm.runs for event in run.events["evaluate"])
    if metric := next(metrics, None):
        return metric["name"], metric["split"]
    event = next(evaluated, None)
    return (next(iter(event["metrics"])), event["split"]) if event else ("", "")


def _evaluations(arm: Arm, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean seconds and metric at each step that all runs evaluated, shape (E, 2), and half widths (E,)."""
    points = [dict(_points(run, split, name)) for run in arm.runs]
    steps = sorted(set.intersection(*(set(own) for own in points)))
    found = np.array([[own[step] for own in points] for step in steps]).reshape(len(steps), len(points), 2)
    return found.mean(1), np.array([half_width(row[:, 1].tolist()) or 0.0 for row in found])


def _points(run: Run, split: str, name: str) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yields for each evaluated step its seconds of training and its metric."""
    for event in run.events["evaluate"]:
        value = event["metrics"].get(name)
        if event["split"] == split and value is not None:
            yield event["step"], (seconds_until(run, event["step"]), value)


def seconds_until(run: Run, step: int) -> float:
    """Returns the seconds of training up to a step: its steps, and the transitions before them."""
    steps = sum(event["step_seconds"] for event in run.events["step"] if event["step"] <= step)
    return steps + sum(event["seconds"] for event in run.events["transition"] if event["step"] < step)


def _frozen(run: Run) -> tuple[list[int], list[float]]:
    """Returns the edges of the plans over the steps, and the frozen part of the blocks between them."""
    plans = dict(run.plans)  # the last of each step
    last = max((event["step"] for event in run.events["step"]), default=0)
    edges = [*plans, max(last, [*plans][-1] + 1)]
    return edges, [plan["num_frozen"] / run.start["num_blocks"] for plan in plans.values()]


def _looks(arms: Sequence[Arm]) -> Iterator[tuple[Arm, str, str]]:
    return zip(arms, cycle(COLOURS), cycle(STYLES), strict=False)


def _figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16))

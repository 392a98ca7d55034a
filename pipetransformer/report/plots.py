"""Figures of a run over its steps: what was decided, what followed, what was learned.

Each function returns a new figure, which needs no closing, or ``None`` where the run has nothing to show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import AbstractPathEffect, Normal, Stroke

from pipetransformer.report.decisions import is_of_the_guard
from pipetransformer.report.format import grid, num_devices
from pipetransformer.report.run_folder import Run
from pipetransformer.report.sinks import Values
from pipetransformer.report.style import (
    CACHED,
    COLOURS,
    FROZEN,
    STEP_LABEL,
    fill,
    legend_below,
    looks,
    new_figure,
    new_panels,
    set_title,
    whole_numbers,
)

SMOOTHING_STEPS, NUM_TICKS = 25, 4
OUTLINE: list[AbstractPathEffect] = [Stroke(linewidth=4.5, foreground="white"), Normal()]
"""Around a line on colours, so that it is seen on dark ones in a grey print too."""
MIN_WIDTH_OF_NAME = 0.04  # of a plan, as a part of all steps


def signals(run: Run) -> Figure | None:
    """Draws what the freeze policy saw, block by block over the steps, a panel per signal; on it, all decisions.

    Each column has the numbers measured between two decisions, frozen blocks are blank. The line is the frozen prefix,
    whoever decided; crosses are decisions of the guard.
    """
    measured = [each for each in run.events["decision"] if any(each["gradient_norms"]) or each.get("signals")]
    panels = _signal_panels(measured)
    if not panels:
        return None
    edges = np.array([0, *(decision["step"] for decision in measured)])
    height = 1.0 + 3.2 * len(panels)
    figure, subplots = new_panels("", STEP_LABEL, ["block"] * len(panels), height)
    for axes, (name, values) in zip(subplots, panels.items(), strict=True):
        mesh = axes.pcolormesh(
            edges, np.arange(values.shape[1] + 1) + 0.5, values.T, cmap="cividis", norm=_colour_scale(values)
        )
        _draw_decisions(axes, run)
        set_title(axes, name.replace("_", " "))
        _add_scale(figure, mesh, axes, name.replace("_", " "))
        whole_numbers(axes, x=True, y=True)
    legend_below(subplots[0])
    return figure


def _signal_panels(decisions: Sequence[Values]) -> dict[str, np.ndarray]:
    """Returns each signal with a number per block, shape (decisions, L), NaN where there is none."""
    panels: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(("gradient_norm", *(name for each in decisions for name in each.get("signals", {})))):
        rows = [_signal(each, name) for each in decisions]
        if all(len(row) == len(decisions[0]["gradient_norms"]) for row in rows):
            values = _floats(rows)
            values[~np.isfinite(values) | (values == 0)] = np.nan
            if values.size and not np.isnan(values).all():
                panels[name] = values
    return panels


def _signal(decision: Values, name: str) -> Sequence[float | None]:
    """Returns a number per block; none where the policy in force did not ask for the signal."""
    norms = decision["gradient_norms"]
    return norms if name == "gradient_norm" else decision.get("signals", {}).get(name, [None] * len(norms))


def _add_scale(figure: Figure, mesh: QuadMesh, axes: Axes, label: str) -> None:
    """Adds the scale of the colours, with a few plain numbers on it."""
    low, high = mesh.get_clim()
    space = np.geomspace if isinstance(mesh.norm, LogNorm) else np.linspace
    bar = figure.colorbar(mesh, ax=axes, label=label, ticks=space(low, high, NUM_TICKS), format="%.2g")
    bar.ax.minorticks_off()


def _colour_scale(values: np.ndarray) -> Normalize:
    """Returns a logarithmic scale, or a linear one where numbers are negative."""
    return Normalize() if np.nanmin(values) < 0 else LogNorm()


def _draw_decisions(axes: Axes, run: Run) -> None:
    """Draws the frozen prefix after each decision, and what the guard took back."""
    decisions = run.events["decision"]
    last = max([each["step"] for each in (*run.events["step"], *decisions)], default=1)
    edges = [0, *(each["step"] for each in decisions), last]
    begin = decisions[0]["num_frozen_before"] if decisions else 0
    frozen = [begin + 0.5, *(each["num_frozen"] + 0.5 for each in decisions)]
    line = axes.stairs(frozen, edges, baseline=None, color=COLOURS[5], linewidth=2.5, label="frozen below")
    line.set_path_effects(OUTLINE)
    points = [(each["step"], each["num_frozen"] + 0.5) for each in decisions if is_of_the_guard(each)]
    if points:
        looks_of_it = {"color": "black", "markeredgecolor": "white", "label": "taken back or held by the guard"}
        axes.plot(*np.array(points).T, linestyle="", marker="X", markersize=10, **looks_of_it)


def stages_over_time(run: Run) -> Figure:
    """Draws the stage of each layer over the steps; above, the number of stages x replicas."""
    spans = list(_spans(run))
    num_layers, num_stages = run.start["num_blocks"] + 2, max(len(plan["stages"]) for _, _, plan in spans)
    figure, axes = new_figure("Stages of the layers (above: stages x replicas)", STEP_LABEL, "layer")
    axes.set_title(axes.get_title(loc="left"), loc="left", fontweight="bold", pad=20)  # above the words on the axes
    for begin, end, plan in spans:
        for layer in range(num_layers):
            axes.add_patch(_layer_patch(layer, begin, end, plan))
        _name_stages(axes, begin, end, plan, spans[-1][1] - spans[0][0])
    _annotate_arrangements(axes, spans, num_layers)
    axes.set(xlim=(spans[0][0], spans[-1][1]), ylim=(-0.5, num_layers - 0.5))
    shown = [0, *range(1, num_layers - 1, -(-num_layers // 14)), num_layers - 1]
    axes.set_yticks(shown, ["embedding", *map(str, shown[1:-1]), "head"])
    whole_numbers(axes, x=True)
    handles = [Patch(**_stage_look(stage), label=f"stage {stage + 1}") for stage in range(num_stages)]
    handles += [Patch(**FROZEN_LOOK, label="frozen"), Patch(**CACHED_LOOK, label="cached")]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, handleheight=1.4)
    return figure


FROZEN_LOOK = {"facecolor": FROZEN, "edgecolor": "white", "linewidth": 0.8}
CACHED_LOOK = {"facecolor": CACHED, "edgecolor": FROZEN, "hatch": "//", "linewidth": 0}


def _stage_look(stage: int) -> dict[str, Any]:
    colour, hatch = fill(stage)
    return {"facecolor": colour, "edgecolor": "white", "hatch": hatch, "linewidth": 0.8}


def _name_stages(axes: Axes, begin: int, end: int, plan: Values, num_steps: int) -> None:
    """Writes the number of each stage on it, where there is room."""
    if (end - begin) < MIN_WIDTH_OF_NAME * num_steps:
        return
    lowest = max(plan["cache_level"], plan["num_frozen"])
    lowest = lowest + 1 if lowest else 0
    box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    for stage, (first, last) in enumerate(plan["stages"], start=1):
        if last >= lowest:
            middle = (max(first, lowest) + last) / 2
            axes.text((begin + end) / 2, middle, str(stage), ha="center", va="center", fontsize=9, bbox=box)


def devices(run: Run) -> Figure:
    """Draws the numbers of stages, replicas and idle devices over the steps."""
    figure, axes = new_figure("Stages, replicas and idle devices", STEP_LABEL, "number", height=3.2)
    spans = list(_spans(run))
    edges = [spans[0][0], *(end for _, end, _ in spans)]
    lines = {
        "stages of a replica": [len(plan["stages"]) for _, _, plan in spans],
        "replicas": [plan["num_replicas"] for _, _, plan in spans],
        "idle devices": [plan["world_size"] - num_devices(plan) for _, _, plan in spans],
    }
    for number, ((label, values), look) in enumerate(looks([*lines.items()])):
        width = 4.5 - 1.5 * number  # equal numbers lie on each other
        axes.stairs(values, edges, baseline=None, color=look.colour, linestyle=look.style, linewidth=width, label=label)
    axes.set_ylim(-0.2, max(map(max, lines.values())) + 0.4)
    whole_numbers(axes, x=True, y=True)
    legend_below(axes)
    return figure


def throughput(run: Run) -> Figure:
    """Draws samples per second of each step, and the median under each plan."""
    figure, axes = new_figure("Throughput", STEP_LABEL, "samples per second")
    steps, rates = _series(run.events["step"], "samples_per_second")
    axes.plot(steps, rates, color=COLOURS[4], linewidth=0.8, label="each step")
    for number, (begin, end, _) in enumerate(_spans(run)):
        held = rates[(steps > begin) & (steps <= end)]
        if held.size:
            label = "median under each plan" if number == 0 else "_nolegend_"
            axes.hlines(np.nanmedian(held), begin, end, color=COLOURS[0], linewidth=2.5, label=label)
        if number:
            axes.axvline(begin, color=FROZEN, linestyle=":", zorder=0)
    axes.set_ylim(bottom=0)
    whole_numbers(axes, x=True)
    legend_below(axes)
    return figure


def loss(run: Run) -> Figure:
    """Draws the training loss of each step, and its mean over a moving window; dotted lines are transitions."""
    figure, axes = new_figure("Training loss", STEP_LABEL, "mean loss of a sample")
    steps, losses = _series(run.events["step"], "loss")
    axes.plot(steps, losses, color=COLOURS[4], linewidth=0.8, label="each step")
    window = min(SMOOTHING_STEPS, len(losses) // 4)
    if window > 1:
        mean = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(steps[window - 1 :], mean, color=COLOURS[0], linewidth=2, label=f"mean of the last {window} steps")
    for transition in run.events["transition"]:
        axes.axvline(transition["step"], color=FROZEN, linestyle=":", zorder=0)
    whole_numbers(axes, x=True)
    legend_below(axes)
    return figure


def metrics(run: Run) -> Figure | None:
    """Draws every metric of every evaluated split over the steps; those that leave 0 to 1 in a panel of their own."""
    evaluations = run.events["evaluate"]
    lines = dict.fromkeys((e["split"], name) for e in evaluations for name in e["metrics"])
    points = {
        line: _floats([(e["step"], e["metrics"].get(line[1])) for e in evaluations if e["split"] == line[0]])
        for line in lines
    }
    if not points:
        return None
    panels = {"metric, 0 to 1": [], "metric": []}
    for (line, values), look in looks([*points.items()]):
        low, high = np.nanmin(values[:, 1], initial=0), np.nanmax(values[:, 1], initial=0)
        panels["metric, 0 to 1" if low >= 0 and high <= 1 else "metric"].append((line, values, look))
    shown = {label: own for label, own in panels.items() if own}
    figure, subplots = new_panels("Evaluation", STEP_LABEL, [*shown], 1.4 + 2.8 * len(shown))
    for axes, own in zip(subplots, shown.values(), strict=True):
        for (split, name), values, look in own:
            style = {"color": look.colour, "linestyle": look.style, "marker": look.marker}
            axes.plot(*values.T, **style, label=f"{split} {name}")
        whole_numbers(axes, x=True)
        axes.legend(frameon=False, handlelength=3.2, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _floats(values: Sequence[object]) -> np.ndarray:
    """Returns an array in which the nulls of JSON are NaN again."""
    return np.array(values, dtype=np.float64)


def _series(events: list[Values], name: str) -> tuple[np.ndarray, np.ndarray]:
    return _floats([event["step"] for event in events]), _floats([event[name] for event in events])


def _spans(run: Run) -> Iterator[tuple[int, int, Values]]:
    """Yields each plan with the steps between which it held."""
    last = max((event["step"] for event in run.events["step"]), default=1)
    begins = [step for step, _ in run.plans]
    for (begin, plan), end in zip(run.plans, [*begins[1:], max(last, begins[-1])], strict=True):
        if begin < end:
            yield begin, end, plan


def _layer_patch(layer: int, begin: int, end: int, plan: Values) -> Rectangle:
    place = ((begin, layer - 0.5), end - begin, 1)
    if plan["cache_level"] and layer <= plan["cache_level"]:
        return Rectangle(*place, **CACHED_LOOK)
    if plan["num_frozen"] and layer <= plan["num_frozen"]:
        return Rectangle(*place, **FROZEN_LOOK)
    return Rectangle(*place, **_stage_look(next(n for n, (_, last) in enumerate(plan["stages"]) if layer <= last)))


def _annotate_arrangements(axes: Axes, spans: list[tuple[int, int, Values]], num_layers: int) -> None:
    """Writes ``stages x replicas`` once above each stretch of plans that share them."""
    for arranged, group in groupby(spans, key=lambda span: grid(span[2])):
        stretch = list(group)
        middle = (stretch[0][0] + stretch[-1][1]) / 2
        axes.text(middle, num_layers - 0.35, arranged, ha="center", va="bottom", fontsize=9)

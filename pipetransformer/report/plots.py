"""Figures of a run folder. Each function returns a new figure, which needs no closing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from pipetransformer.report.reporter import Values
from pipetransformer.report.run_folder import Run

# Okabe and Ito's palette: its colours stay apart for every kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
FROZEN, CACHED = "#BBBBBB", "#EEEEEE"
STEP_LABEL = "optimizer step"
SMOOTHING_STEPS = 25


def signals(run: Run) -> Figure:
    """Draws what the freeze policy saw, block by block over the steps, a panel per signal; on it, all decisions.

    Each column has the numbers measured between two decisions, frozen blocks are blank. The line is the frozen prefix,
    whoever decided; crosses are decisions that the guard took back.
    """
    measured = [each for each in run.events["decision"] if any(each["gradient_norms"]) or each.get("signals")]
    panels = _signal_panels(measured)
    figure = Figure(figsize=(9, 0.8 + 3.4 * max(1, len(panels))), layout="constrained")
    if not panels:
        return _nothing_to_draw(figure, figure.subplots(), "the run made no freeze decision")
    edges = np.array([0, *(decision["step"] for decision in measured)])
    subplots = np.atleast_1d(figure.subplots(len(panels), sharex=True))
    for axes, (name, values) in zip(subplots, panels.items(), strict=True):
        mesh = axes.pcolormesh(
            edges, np.arange(values.shape[1] + 1) + 0.5, values.T, cmap="cividis", norm=_colour_scale(values)
        )
        _draw_decisions(axes, run)
        axes.set(ylabel="block")
        axes.set_title(name.replace("_", " "), loc="left", fontweight="bold")
        figure.colorbar(mesh, ax=axes)
    axes.set(xlabel=STEP_LABEL)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), frameon=False, ncols=2)
    return figure


def _signal_panels(decisions: Sequence[Values]) -> dict[str, np.ndarray]:
    """Returns each signal with a number per block, shape (decisions, L), NaN where there is none."""
    panels: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(("gradient_norm", *(name for each in decisions for name in each.get("signals", {})))):
        rows = [each["gradient_norms"] if name == "gradient_norm" else each["signals"][name] for each in decisions]
        if name == "gradient_norm" or all(len(row) == len(decisions[0]["gradient_norms"]) for row in rows):
            values = _floats(rows)
            values[~np.isfinite(values) | (values == 0)] = np.nan
            if values.size and not np.isnan(values).all():
                panels[name] = values
    return panels


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
    axes.stairs(frozen, edges, baseline=None, color=COLOURS[5], linewidth=2.5, label="frozen below")
    taken_back = [each for each in decisions if each["bound"] == "guard"]
    points = [(each["step"], each["num_frozen"] + 0.5) for each in taken_back]
    label = "taken back or held by the guard" if points else "_nolegend_"
    axes.plot(*np.array(points).reshape(-1, 2).T, linestyle="", marker="X", color="black", markersize=9, label=label)


def stages_over_time(run: Run) -> Figure:
    """Draws the stage of each layer over the steps; above, the number of stages x replicas."""
    figure, axes = _figure("Stages of the layers (above: stages x replicas)", STEP_LABEL, "layer")
    spans = list(_spans(run))
    num_layers = run.start["num_blocks"] + 2
    for begin, end, plan in spans:
        for layer in range(num_layers):
            axes.add_patch(_layer_patch(layer, begin, end, plan))
    _annotate_arrangements(axes, spans, num_layers)
    axes.set(xlim=(spans[0][0], spans[-1][1]), ylim=(-0.5, num_layers - 0.5))
    shown = [0, *range(1, num_layers - 1, -(-num_layers // 14)), num_layers - 1]
    axes.set_yticks(shown, ["embedding", *map(str, shown[1:-1]), "head"])
    num_stages = max(len(plan["stages"]) for _, _, plan in spans)
    handles = [Patch(color=COLOURS[stage % len(COLOURS)], label=f"stage {stage + 1}") for stage in range(num_stages)]
    handles += [
        Patch(color=FROZEN, label="frozen"),
        Patch(facecolor=CACHED, edgecolor=FROZEN, hatch="//", label="cached"),
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def throughput(run: Run) -> Figure:
    """Draws samples per second of each step, and the median under each plan."""
    figure, axes = _figure("Throughput", STEP_LABEL, "samples per second")
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
    axes.legend(frameon=False)
    return figure


def loss(run: Run) -> Figure:
    """Draws the training loss of each step, and its mean over a moving window; dotted lines are transitions."""
    figure, axes = _figure("Training loss", STEP_LABEL, "loss")
    steps, losses = _series(run.events["step"], "loss")
    axes.plot(steps, losses, color=COLOURS[4], linewidth=0.8, label="each step")
    window = min(SMOOTHING_STEPS, len(losses) // 4)
    if window > 1:
        mean = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(steps[window - 1 :], mean, color=COLOURS[0], linewidth=2, label=f"mean of the last {window} steps")
    for transition in run.events["transition"]:
        axes.axvline(transition["step"], color=FROZEN, linestyle=":", zorder=0)
    axes.legend(frameon=False)
    return figure


def accuracy(run: Run) -> Figure:
    """Draws every metric of every evaluated split over the steps."""
    figure, axes = _figure("Evaluation", STEP_LABEL, "metric (0 to 1)")
    evaluations = run.events["evaluate"]
    lines = dict.fromkeys((e["split"], name) for e in evaluations for name in e["metrics"])
    if not lines:
        return _nothing_to_draw(figure, axes, "the run was not evaluated")
    for number, (split, name) in enumerate(lines):
        points = [(e["step"], e["metrics"][name]) for e in evaluations if e["split"] == split and name in e["metrics"]]
        axes.plot(*_floats(points).T, marker="o", color=COLOURS[number % len(COLOURS)], label=f"{split} {name}")
    axes.legend(frameon=False)
    return figure


def compare(runs: Mapping[str, Run]) -> Figure:
    """Draws speed-up over the best static plan (its limit as a mark) and main metric of several runs by name."""
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(runs)), layout="constrained")
    speed, quality = figure.subplots(1, 2, sharey=True)
    names, summaries = list(runs), [run.summary for run in runs.values()]
    metrics = [summary.get("metric") or {} for summary in summaries]
    speed.invert_yaxis()  # the first run on top
    _bars(speed, names, [summary.get("speedup_vs_static") for summary in summaries], COLOURS[0])
    limits = _floats([summary.get("limit") for summary in summaries])
    speed.plot(
        limits, names, linestyle="", marker="|", markersize=16, markeredgewidth=2.5, color=COLOURS[5], label="limit"
    )
    speed.axvline(1, color="black", linestyle=":", label="best static plan")
    speed.set(xlabel="speed-up (times)", title="Speed-up")
    speed.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.25), ncols=2)
    _bars(quality, names, [metric.get("value") for metric in metrics], COLOURS[2])
    metric_names = dict.fromkeys(metric["name"] for metric in metrics if metric)
    quality.set(xlabel=", ".join(metric_names), title="Result")
    quality.set_xlim(right=1.15)
    return figure


def _figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_title(title, loc="left", fontweight="bold", pad=20)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _nothing_to_draw(figure: Figure, axes: Axes, why: str) -> Figure:
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])
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
        return Rectangle(*place, facecolor=CACHED, edgecolor=FROZEN, hatch="//", linewidth=0)
    if plan["num_frozen"] and layer <= plan["num_frozen"]:
        return Rectangle(*place, facecolor=FROZEN, edgecolor="white", linewidth=0.8)
    stage = next(stage for stage, (_, last) in enumerate(plan["stages"]) if layer <= last)
    return Rectangle(*place, facecolor=COLOURS[stage % len(COLOURS)], edgecolor="white", linewidth=0.8)


def _annotate_arrangements(axes: Axes, spans: list[tuple[int, int, Values]], num_layers: int) -> None:
    """Writes ``stages x replicas`` once above each stretch of plans that share them."""
    for (stages, replicas), group in groupby(spans, key=lambda span: (len(span[2]["stages"]), span[2]["num_replicas"])):
        stretch = list(group)
        middle = (stretch[0][0] + stretch[-1][1]) / 2
        axes.text(middle, num_layers - 0.35, f"{stages} x {replicas}", ha="center", va="bottom", fontsize=9)


def _bars(axes: Axes, names: list[str], values: list[float | None], colour: str) -> None:
    bars = axes.barh(names, np.nan_to_num(_floats(values)), color=colour, height=0.6)
    axes.bar_label(bars, ["-" if value is None else f"{value:.3g}" for value in values], padding=4)
    axes.spines[["top", "right"]].set_visible(False)

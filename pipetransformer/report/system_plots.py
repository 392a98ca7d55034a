"""Figures of what the system did in a run, and what that took: transitions, parts of a step, gain, cache, a trace.

Each function returns a new figure, or ``None`` where the run has nothing to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipetransformer.report.decisions import PARTS
from pipetransformer.report.format import arrangement, grid, plural, two_digits
from pipetransformer.report.run_folder import Run
from pipetransformer.report.sinks import Values
from pipetransformer.report.style import (
    COLOURS,
    FROZEN,
    STEP_LABEL,
    fill,
    legend_below,
    new_panels,
    new_row,
    set_title,
    whole_numbers,
)
from pipetransformer.report.summary_text import SMALL_PART, TIME_PARTS
from pipetransformer.report.trace import CATEGORIES, COMPUTE, Event, read_traces

MAX_TRANSITIONS, MAX_TRACES, MAX_DEVICES = 40, 4, 16
MIB = 2**20
PART_NAMES = dict(
    zip(PARTS, ("choosing", "filling the cache", "process groups", "moving layers", "rebuilding"), strict=True)
)
LETTER = 0.01  # its width, as a part of the longest step


def transitions(run: Run) -> Figure | None:
    """Draws the seconds of each transition by what they went to, and the bytes that it moved."""
    shown = run.events["transition"][-MAX_TRANSITIONS:]
    if not shown:
        return None
    sizes, rows = _floats([each["bytes_moved"] for each in shown]) / MIB, np.arange(len(shown))
    title = "Transitions" + _last_of(run.events["transition"])
    title += "" if sizes.any() else " (nothing was moved between devices)"
    labels = ["time, s", "moved between devices, MiB"][: 1 + bool(sizes.any())]
    figure, (seconds, *others) = new_row(title, labels, len(shown))
    _draw_parts(seconds, shown)
    for moved in others:
        moved.barh(rows, sizes, height=0.6, color=COLOURS[0])
        counts = [plural(each["num_moves"], "move") for each in shown]
        words = [f"{two_digits(size)} in {count}" if size else "0" for size, count in zip(sizes, counts, strict=True)]
        _name_bars(moved, sizes, words)
    names = [f"step {t['step']:,}: {t['before']['num_frozen']} to {t['after']['num_frozen']} frozen" for t in shown]
    seconds.set_yticks(rows, names)
    legend_below(seconds, num_columns=5)
    return figure


def _last_of(rows: Sequence[Values]) -> str:
    """Returns which of the rows a figure has, where it has not room for all."""
    return f", the last {MAX_TRANSITIONS} of {len(rows)}" if len(rows) > MAX_TRANSITIONS else ""


def _draw_parts(axes: Axes, shown: Sequence[Values]) -> None:
    """Draws a bar for each transition, with the parts of its seconds behind each other."""
    parts = {PART_NAMES[part]: _floats([each.get(f"{part}_seconds", 0.0) for each in shown]) for part in PARTS}
    lost = _floats([each.get("lost_seconds", 0.0) for each in shown])  # where the guard has rolled the run back
    if lost.any():
        parts["steps trained again"] = lost
    _name_bars(axes, _stack_bars(axes, parts), [f"{two_digits(each['seconds'])} s" for each in shown])


def _stack_bars(axes: Axes, parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Draws bars whose parts lie behind each other, and returns their ends; no two parts look alike.

    Args:
        parts: By their name the lengths of all bars; NaN is none.
    """
    ends = np.zeros(1)
    for number, (name, lengths) in enumerate(parts.items()):
        colour, hatch = fill(number)
        look = {"color": colour, "hatch": hatch, "edgecolor": "white"}
        axes.barh(range(len(lengths)), lengths, left=ends, height=0.6, label=name, **look)
        ends = ends + np.nan_to_num(lengths)
    return ends


def step_parts(run: Run) -> Figure | None:
    """Draws the parts of a step under each plan as predicted, and a mark where the measured step ends."""
    told = [plan for plan in run.summary.get("plans", []) if plan.get("step_parts")]
    plans = told[-MAX_TRANSITIONS:]
    if not plans:
        return None
    figure, (axes,) = new_row("A step by what it goes to" + _last_of(told), ["time of a step, ms"], len(plans))
    names = [name for name in TIME_PARTS if name in plans[0]["step_parts"]]
    parts = {TIME_PARTS[name]: _floats([plan["step_parts"][name] for plan in plans]) * 1000 for name in names}
    longest = np.max(sum(parts.values()))
    ends = _stack_bars(axes, {name: own for name, own in parts.items() if own.max() >= SMALL_PART * longest})
    measured = _floats([plan.get("median_step_s") for plan in plans]) * 1000
    marks = {"color": "black", "markeredgecolor": "white", "markersize": 9, "linestyle": "none"}
    axes.plot(measured, range(len(plans)), marker="D", label="measured", **marks)
    axes.set_xlim(0, 1.1 * np.nanmax([*ends, *measured], initial=1e-9))
    axes.set_yticks(range(len(plans)), [f"from step {plan['step']:,}: {grid(plan)}, {_state(plan)}" for plan in plans])
    legend_below(axes, num_columns=5)
    return figure


def gain(run: Run) -> Figure | None:
    """Draws the speed-up over the best static plan, between that plan and the limit; not of that plan itself."""
    summary = run.summary
    values = {"best static plan": 1.0, "this run": summary.get("speedup_vs_static"), "limit": summary.get("limit")}
    if values["this run"] is None or summary.get("is_static"):
        return None
    shown = {name: value for name, value in values.items() if value is not None}
    figure, (axes,) = new_row("Speed-up and its limit", ["speed-up over the best static plan, times"], len(shown))
    looks = {"best static plan": (FROZEN, ""), "this run": (COLOURS[0], ""), "limit": ("white", "///")}
    for row, (name, value) in enumerate(shown.items()):
        colour, hatch = looks[name]
        axes.barh(row, value, height=0.6, color=colour, hatch=hatch, edgecolor=COLOURS[0] if hatch else colour)
    share = summary.get("share_of_limit")
    words = {"this run": "" if share is None else f" ({share:.0%} of the limit)"}
    sizes = np.array([*shown.values()])
    _name_bars(axes, sizes, [f"{two_digits(value)}{words.get(name, '')}" for name, value in shown.items()], room=1.5)
    axes.set_yticks(range(len(shown)), [*shown])
    return figure


def cache(run: Run) -> Figure | None:
    """Draws the cache level and what it stores over the steps, and how long steps waited for it."""
    reading = [each for each in run.events["step"] if each.get("cache_wait_seconds") is not None]
    if not reading and not run.events["cache_fill"]:
        return None
    labels = ["block read\nfrom the cache", "stored, MiB", "waiting for\nthe cache, ms"]
    figure, (level, stored, waiting) = new_panels("Cache", STEP_LABEL, labels, 6.0)
    steps, fills = run.events["step"], run.events["cache_fill"]
    numbers = _floats([each["step"] for each in steps])
    level.step(numbers, _floats([each["cache_level"] for each in steps]), where="pre", color=COLOURS[0], linewidth=2)
    last = max([each["step"] for each in (*steps, *fills)])
    edges = [0, *(each["step"] for each in fills), last]
    sizes = [0, *(each["bytes"] / MIB for each in fills)]
    stored.stairs(sizes, edges, baseline=None, color=COLOURS[2], linewidth=2)
    waited = _floats([(each["step"], each["cache_wait_seconds"] * 1000) for each in reading]).reshape(-1, 2)
    waiting.plot(*waited.T, color=COLOURS[5], linewidth=1)
    for axes in (level, stored, waiting):
        axes.set_ylim(bottom=0)
    whole_numbers(level, y=True)
    whole_numbers(waiting, x=True)
    return figure


def timeline(run: Run) -> Figure | None:
    """Draws one step of each traced plan on every device: computing on its row, communication below it."""
    traces = read_traces(run.folder)
    if not traces:
        return None
    chosen = sorted({round(index) for index in np.linspace(0, len(traces) - 1, min(MAX_TRACES, len(traces)))})
    shown = [[*traces.items()][index] for index in chosen]
    found = [1 + max((event.rank for event in events), default=0) for _, events in shown]
    counts = [min(MAX_DEVICES, count) for count in found]
    height = 1.4 + sum(0.9 + 0.42 * count for count in counts)
    labels = ["device"] * len(shown)
    figure, panels = new_panels("", "time in the step, ms", labels, height)
    longest_s = max((event.end_s for _, events in shown for event in events), default=0.0)
    for axes, (number, events), count, num_found in zip(panels, shown, counts, found, strict=True):
        _draw_step(axes, [event for event in events if event.rank < count], longest_s)
        axes.set_yticks(range(count), [str(rank) for rank in range(count)])
        axes.set(xlim=(0, 1.02 * longest_s * 1000 or 1.0), ylim=(count - 0.4, -0.6))
        cut = f", the first {count} of {num_found} devices" if count < num_found else ""
        set_title(axes, _plan_of(run, number) + cut)
    handles = [Patch(**_look(category), label=category) for category in CATEGORIES]
    figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, handleheight=1.4)
    return figure


def _draw_step(axes: Axes, events: Sequence[Event], longest_s: float) -> None:
    for event in events:
        is_compute = event.category in COMPUTE
        place = (event.rank - (0.4 if is_compute else -0.12), 0.5 if is_compute else 0.25)
        axes.broken_barh([(event.start_s * 1000, event.seconds * 1000)], place, **_look(event.category), linewidth=0.6)
        if is_compute and event.seconds > LETTER * (len(event.name) + 1) * longest_s:
            middle = (event.start_s + event.end_s) / 2 * 1000
            box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
            axes.text(
                middle, event.rank - 0.15, event.name, ha="center", va="center", fontsize=7, bbox=box, clip_on=True
            )


def _look(category: str) -> dict[str, Any]:
    colour, hatch = fill(CATEGORIES.index(category))
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "white"}


def _plan_of(run: Run, number: int) -> str:
    """Returns which plan a trace is of, by its number."""
    plans: Sequence[Values] = run.summary.get("plans") or [plan | {"step": step} for step, plan in run.plans]
    if number >= len(plans):
        return f"plan {number}"
    plan = plans[number]
    return f"plan from step {plan['step']:,}: {arrangement(plan)}, {_state(plan)}"


def _state(plan: Values) -> str:
    """Returns how many blocks are frozen and cached."""
    cached = f", {plan['cache_level']} cached" if plan["cache_level"] else ""
    return f"{plan['num_frozen']} frozen{cached}"


def _name_bars(axes: Axes, ends: np.ndarray, words: Sequence[str], room: float = 1.35) -> None:
    """Writes words behind the ends of bars, and makes room for them."""
    for row, (end, word) in enumerate(zip(np.nan_to_num(ends), words, strict=True)):
        axes.annotate(word, (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, (np.nanmax(ends, initial=0.0) or 1.0) * room)


def _floats(values: Sequence[object]) -> np.ndarray:
    """Returns an array in which the nulls of JSON are NaN again."""
    return np.array(values, dtype=np.float64)

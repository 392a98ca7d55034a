"""The look of figures: one palette, and lines, marks and hatches that stay apart in a grey print; files of figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple, TypeVar

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's palette: its colours stay apart for every kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
LINE_COLOURS = COLOURS[:-1]  # a yellow line on white is hardly seen
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # 7 beside 4 styles: 28 pairs
HATCHES = ("", "\\\\\\", "...", "xxx", "---", "+++", "ooo", "|||")
FROZEN, CACHED = "#BBBBBB", "#EEEEEE"
STEP_LABEL = "optimizer step"
WIDTH = 9.0  # inches
MAX_LABEL, MAX_NAME = 100, 48  # characters that fit it, and that fit beside an axis
FREE_ROWS, ROW_HEIGHT = 2, 0.21  # rows of a legend for which a figure has room, and inches of each that it grows by
SUFFIXES = ("png", "svg")
DPI = 110
T = TypeVar("T")


class Look(NamedTuple):
    """How one of several things that are drawn together looks."""

    colour: str
    style: str
    marker: str
    hatch: str


def looks(things: Sequence[T]) -> Iterator[tuple[T, Look]]:
    """Yields each thing with a look; up to 28 differ without their colours, and up to 8 of those with hatches."""
    for thing, *look in zip(things, cycle(LINE_COLOURS), cycle(STYLES), cycle(MARKERS), cycle(HATCHES), strict=False):
        yield thing, Look(*look)


def fill(number: int) -> tuple[str, str]:
    """Returns colour and hatch of one of several areas; up to 64 differ: colours come again with other hatches."""
    return COLOURS[number % len(COLOURS)], HATCHES[(number + number // len(COLOURS)) % len(HATCHES)]


def new_figure(title: str, x_label: str, y_label: str, height: float = 4.2) -> tuple[Figure, Axes]:
    """Returns a figure with one panel.

    Args:
        x_label: Quantity and unit.
        y_label: Quantity and unit.
        height: In inches.
    """
    figure, (axes,) = new_panels(title, x_label, [y_label], height)
    return figure, axes


def new_panels(title: str, x_label: str, y_labels: Sequence[str], height: float) -> tuple[Figure, list[Axes]]:
    """Returns a figure with panels below each other that share their horizontal axis, labelled on the last one."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = [*figure.subplots(len(y_labels), sharex=True, squeeze=False)[:, 0]]
    for axes, label in zip(panels, y_labels, strict=True):
        axes.set_ylabel(label)
        strip(axes)
    panels[-1].set_xlabel(x_label)
    set_title(panels[0], title)
    return figure, panels


def new_row(title: str, x_labels: Sequence[str], num_rows: int) -> tuple[Figure, list[Axes]]:
    """Returns a figure with panels side by side for horizontal bars, the first of which is on top."""
    figure = Figure(figsize=(WIDTH, 1.5 + 0.42 * num_rows), layout="constrained")
    panels = [*figure.subplots(1, len(x_labels), sharey=True, squeeze=False)[0]]
    for axes, label in zip(panels, x_labels, strict=True):
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        strip(axes)
    panels[0].set_ylim(num_rows - 0.4, -0.6)  # shared by all
    set_title(panels[0], title)
    return figure, panels


def set_title(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", pad=12)


def strip(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def whole_numbers(axes: Axes, *, x: bool = False, y: bool = False) -> None:
    """Keeps the ticks of counts to whole numbers."""
    for axis in [axes.xaxis] * x + [axes.yaxis] * y:
        axis.set_major_locator(MaxNLocator(integer=True))


def legend_below(axes: Axes, num_columns: int = 3) -> None:
    """Places a legend below the figure, where it hides nothing; none where nothing has a label."""
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.get_figure()
    if handles and isinstance(figure, Figure):
        labels = all_shortened(labels, MAX_LABEL)
        widest = max(map(len, labels))
        columns = max(1, min(num_columns, len(handles), 110 // (widest + 8)))
        num_rows = math.ceil(len(handles) / columns)
        figure.set_figheight(figure.get_figheight() + ROW_HEIGHT * max(0, num_rows - FREE_ROWS))
        figure.legend(handles, labels, loc="outside lower left", frameon=False, ncols=columns, handlelength=3.2)


def all_shortened(names: Sequence[str], length: int = MAX_NAME) -> list[str]:
    """Returns names that fit, see :func:`shortened`; those that would be alike have their numbers, from 1."""
    cut = [shortened(name, length) for name in names]
    return [f"{number}: {name}" if cut.count(name) > 1 else name for number, name in enumerate(cut, start=1)]


def shortened(name: str, length: int = MAX_NAME) -> str:
    """Returns a name that fits beside an axis, cut in its middle; dollars in it begin no formula."""
    half = (length - 3) // 2
    cut = name if len(name) <= length else f"{name[:half]} … {name[-half:]}"
    return cut.replace("$", r"\$")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes a figure as PNG, and as SVG whose words are text, and returns the files; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.{suffix}" for suffix in SUFFIXES]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # the same figure gives the same file
        for file in files:
            figure.savefig(file, dpi=2 * DPI, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files

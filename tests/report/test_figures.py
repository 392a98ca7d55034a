"""All figures of both pages: axes with units, apart in grey, as PNG and SVG, none where there is nothing to show."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pipetransformer.report import style
from pipetransformer.report.comparison import Arm
from pipetransformer.report.event_log import EVENT_LOG
from pipetransformer.report.figures import OF_A_RUN, OF_ARMS, Drawing, save_all
from pipetransformer.report.run_folder import Run, read_run

STEP = "optimizer step"
TIMES = "speed-up over the best static plan, times"
LABELS: dict[str, list[tuple[str, str]]] = {
    "run result_over_time": [("training time, s", "test accuracy")],
    "run signals": [("", "block"), (STEP, "block"), ("", "gradient norm"), ("", "loss drop")],
    "run stages_over_time": [(STEP, "layer")],
    "run devices": [(STEP, "number")],
    "run transitions": [("time, s", ""), ("moved between devices, MiB", "")],
    "run throughput": [(STEP, "samples per second")],
    "run step_parts": [("time of a step, ms", "")],
    "run gain": [(TIMES, "")],
    "run cache": [("", "block read\nfrom the cache"), ("", "stored, MiB"), (STEP, "waiting for\nthe cache, ms")],
    "run timeline": [("", "device"), ("", "device"), ("time in the step, ms", "device")],
    "run loss": [(STEP, "mean loss of a sample")],
    "run metrics": [(STEP, "metric, 0 to 1")],
    "arms result_over_time": [("training time, s", "test accuracy")],
    "arms gain": [(TIMES, ""), ("share of the limit, %", "")],
    "arms plans_over_steps": [
        ("", "frozen part\nof the blocks"),
        ("", "stages of\na replica"),
        ("", "replicas"),
        (STEP, "idle devices"),
    ],
    "arms cache": [("hits, %", ""), ("stored, MiB", ""), ("waited for it, s", "")],
}
"""Quantity and unit of each axis, across and up. Panels above each other share the lower one's, and bars have names."""
NUM_ARMS = 6


@pytest.fixture
def run(run_folder: Path) -> Run:
    run = read_run(run_folder)
    for decision in run.events["decision"]:
        decision["signals"] = {"loss_drop": [0.5, *[0.25] * 5]}
    return run


def subjects(run: Run, num_arms: int = NUM_ARMS) -> dict[str, tuple[Drawing[Any], Any]]:
    arms = [Arm(f"freeze=policy_{number}", (run,) * (1 + number % 2)) for number in range(num_arms)]
    of_run = {f"run {each.name}": (each, run) for each in OF_A_RUN}
    return of_run | {f"arms {each.name}": (each, arms) for each in OF_ARMS}


def draw(run: Run, name: str) -> Figure:
    drawing, subject = subjects(run)[name]
    figure = drawing.draw(subject)
    assert figure is not None, "there is something to show"
    return figure


def test_every_figure_is_listed_with_its_axes(run: Run) -> None:
    assert subjects(run).keys() == LABELS.keys()


@pytest.mark.parametrize("name", LABELS)
def test_every_axis_says_its_quantity_and_unit(run: Run, name: str) -> None:
    figure = draw(run, name)
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes] == LABELS[name]
    first = figure.axes[0]
    assert first.get_title(loc="left")
    assert first.get_ylabel() or all(label.get_text() for label in first.get_yticklabels()), "each bar has its name"


def grey_handles(figure: Figure) -> list[np.ndarray]:
    """The pictures of a legend's entries, all painted in one grey, so that lines, marks and hatches alone are left."""
    legends = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()))]
    handles = [handle for legend in legends for handle in legend.legend_handles]
    for handle in handles:
        for part in [handle, *handle.get_children()] if handle is not None else ():
            if isinstance(part, Line2D):
                part.set_color("0.4")
                part.set_linewidth(2)
            elif isinstance(part, Patch):
                part.set_facecolor("0.6")
                part.set_edgecolor("white")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba())[:, :, :3].mean(axis=2)
    return [crop(picture, handle) for handle in handles]


def crop(picture: np.ndarray, handle: Any) -> np.ndarray:
    """The surroundings of a legend's entry, which all have one size."""
    box = handle.get_window_extent()
    x, y = round((box.x0 + box.x1) / 2), picture.shape[0] - round((box.y0 + box.y1) / 2)
    return picture[y - 6 : y + 6, x - 22 : x + 22]


def assert_apart(pictures: Sequence[np.ndarray]) -> None:
    assert len(pictures) > 1
    for one, other in combinations(pictures, 2):
        assert np.abs(one - other).max() > 40, "two entries look alike in grey"


@pytest.mark.parametrize(
    "name",
    ["arms result_over_time", "arms plans_over_steps", "run devices", "run metrics", "run transitions", "run timeline"],
)
def test_what_is_drawn_together_stays_apart_in_grey(run: Run, name: str) -> None:
    entries = grey_handles(draw(run, name))
    assert_apart(entries[:4] if name == "arms plans_over_steps" else entries)  # stairs have four styles, and widths


def test_stages_stay_apart_in_grey(run: Run) -> None:
    *stages, _, _ = grey_handles(draw(run, "run stages_over_time"))
    assert_apart(stages)


def test_that_check_notices_lines_that_differ_in_colour_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "STYLES", ("-",))
    monkeypatch.setattr(style, "MARKERS", ("o",))
    with pytest.raises(AssertionError, match="look alike in grey"):
        assert_apart(grey_handles(draw(run, "arms result_over_time")))


def test_figures_become_files_with_words_as_text(run: Run, tmp_path: Path) -> None:
    chosen = [drawing for drawing in OF_A_RUN if drawing.name in ("devices", "gain")]
    files = [*save_all(chosen, run, tmp_path / "figures")]
    assert [file.name for file in files] == ["devices.png", "devices.svg", "gain.png", "gain.svg"]
    for file in files[1::2]:
        words = {element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")}
        assert words & {STEP, TIMES}
    for file in files[::2]:
        assert file.read_bytes().startswith(b"\x89PNG")
    again = [file.read_bytes() for file in save_all(chosen, run, tmp_path / "again")]
    assert again == [file.read_bytes() for file in files], "the same run gives the same files"


@pytest.mark.parametrize("drawing", OF_A_RUN, ids=lambda drawing: drawing.name)
def test_a_run_that_has_only_begun_is_drawn_or_named_as_absent(run_folder: Path, drawing: Drawing[Run]) -> None:
    path = run_folder / EVENT_LOG
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    for file in ("summary.json", *(trace.name for trace in run_folder.glob("trace_*"))):
        (run_folder / file).unlink()
    figure = drawing.draw(read_run(run_folder))
    assert figure is not None or drawing.absent


def test_arms_that_all_failed_are_named_as_absent(run: Run) -> None:
    failed = Run(run.folder, run.config, {"status": "failed"}, {name: [] for name in run.events})
    for drawing in OF_ARMS:
        assert drawing.draw([Arm("failed", (failed,))]) is None
        assert drawing.absent


def test_a_label_that_is_too_long_is_cut_in_its_middle(run: Run) -> None:
    name = " ".join(f"model.options.setting_{number}={number}" for number in range(12))
    figure = draw(run, "arms result_over_time")
    axes = figure.axes[0]
    axes.plot([], [], label=name)
    style.legend_below(axes, num_columns=2)
    legend = figure.legends[-1]
    assert max(len(text.get_text()) for text in legend.get_texts()) <= style.MAX_LABEL
    FigureCanvasAgg(figure).draw()
    assert legend.get_window_extent().width <= figure.bbox.width


def test_names_that_are_alike_when_they_are_cut_have_numbers() -> None:
    names = [f"{'a' * 40} freeze={policy} {'b' * 40}" for policy in ("none", "alpha")]
    first, second, third = style.all_shortened([*names, "c"])
    assert (first[:4], second[:4], third) == ("1: a", "2: a", "c")


def test_a_legend_of_many_lines_leaves_the_axes_their_height(run: Run) -> None:
    heights = []
    for num_lines in (0, 30):
        figure = draw(run, "arms result_over_time")
        axes = figure.axes[0]
        for number in range(num_lines):
            axes.plot([], [], label=f"{number} {'long ' * 18}")
        figure.legends.clear()
        style.legend_below(axes, num_columns=2)
        FigureCanvasAgg(figure).draw()
        heights.append(axes.get_window_extent().height)
    assert heights[1] > 0.8 * heights[0]


def test_no_line_is_yellow_on_white() -> None:
    assert "#F0E442" not in {look.colour for _, look in style.looks(range(28))}

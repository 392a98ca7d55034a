import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch

from pipetransformer.report import plots
from pipetransformer.report.run_folder import EVENT_LOG, Run, read_run

PLOTS = [plots.signals, plots.stages_over_time, plots.throughput, plots.loss, plots.accuracy]


@pytest.fixture
def run(run_folder: Path) -> Run:
    return read_run(run_folder)


def draw(figure: Figure) -> None:
    FigureCanvasAgg(figure).print_png(io.BytesIO())


def colour_at(axes: Axes, step: float, layer: int) -> str:
    """The colour of the last rectangle that covers a point."""
    covering = [
        patch
        for patch in axes.patches
        if isinstance(patch, Rectangle)
        and patch.get_x() < step < patch.get_x() + patch.get_width()
        and patch.get_y() < layer < patch.get_y() + patch.get_height()
    ]
    return to_hex(covering[-1].get_facecolor()).upper()


@pytest.mark.parametrize("plot", PLOTS)
def test_each_figure_draws_and_names_its_axes(run: Run, plot: Callable[[Run], Figure]) -> None:
    figure = plot(run)
    draw(figure)
    axes = figure.axes[0]
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    assert axes.get_title(loc="left")


@pytest.mark.parametrize("plot", PLOTS)
def test_each_figure_draws_for_a_run_that_has_only_begun(run_folder: Path, plot: Callable[[Run], Figure]) -> None:
    path = run_folder / EVENT_LOG
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    draw(plot(read_run(run_folder)))


def drawn(axes: Axes) -> list[list[float | None]]:
    """What a panel shows of each block at each decision."""
    (mesh,) = [artist for artist in axes.collections if isinstance(artist, QuadMesh)]
    return np.ma.masked_invalid(np.ma.asarray(mesh.get_array())).T.tolist()


def test_frozen_blocks_are_blank_in_the_signals(run: Run) -> None:
    found = drawn(plots.signals(run).axes[0])
    assert found == [[0.1, 0.2, 0.4, 0.8, 1.6, 3.2], [None, None, 0.4, 0.8, 1.6, 3.2]]


def test_each_signal_has_a_panel_with_the_decisions_on_it(run: Run) -> None:
    for decision in run.events["decision"]:
        decision["signals"] = {"loss_drop": [-0.5, *[0.25] * 5], "step_share": [1.0] * 7}
    figure = plots.signals(run)
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left") for axes in panels] == ["gradient norm", "loss drop"]
    assert drawn(panels[1])[0] == [-0.5, *[0.25] * 5]
    for axes in panels:
        (stairs,) = [artist for artist in axes.patches if isinstance(artist, StepPatch)]
        values, edges, _ = stairs.get_data()
        assert (list(values), list(edges)) == ([0.5, 2.5, 4.5], [0, 8, 16, 24])


def test_a_decision_that_the_guard_took_back_is_marked(run: Run) -> None:
    taken_back = run.events["decision"][-1] | {"bound": "guard", "step": 20, "num_frozen": 2, "num_frozen_before": 4}
    run.events["decision"].append(taken_back)
    axes = plots.signals(run).axes[0]
    (cross,) = [line for line in axes.lines if line.get_marker() == "X"]
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([20], [2.5])
    assert "taken back or held by the guard" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_layer_has_the_colour_of_its_stage_until_it_is_frozen_and_then_cached(run: Run) -> None:
    axes = plots.stages_over_time(run).axes[0]
    first, second, third, fourth = plots.COLOURS[:4]
    colours = [[colour_at(axes, step, layer) for layer in range(8)] for step in (4, 12, 20)]
    assert colours == [
        [first, first, second, second, third, third, fourth, fourth],
        [plots.FROZEN] * 3 + [first] * 2 + [second] * 3,
        [plots.CACHED] * 5 + [first] * 3,
    ]


def test_the_embedding_is_active_while_no_block_is_frozen(run: Run) -> None:
    assert colour_at(plots.stages_over_time(run).axes[0], 4, 0) == plots.COLOURS[0]


def test_stages_and_replicas_stand_above_the_stretch_in_which_they_held(run: Run) -> None:
    texts = plots.stages_over_time(run).axes[0].texts
    assert [(text.get_position()[0], text.get_text()) for text in texts] == [(4, "4 x 1"), (12, "2 x 2"), (20, "1 x 4")]


def test_the_throughput_of_each_plan_is_its_median(run: Run) -> None:
    steps = run.events["step"]
    steps[8]["samples_per_second"] = 1.0  # the first step after a transition
    lines = [line for line in plots.throughput(run).axes[0].collections if isinstance(line, LineCollection)]
    medians = [np.asarray(line.get_segments()[0]) for line in lines]
    assert [segment[:, 0].tolist() for segment in medians] == [[0, 8], [8, 16], [16, 24]]
    assert [segment[0, 1] for segment in medians] == pytest.approx([160, 480, 800])


def test_the_loss_shows_gaps_where_it_was_not_finite(run: Run) -> None:
    run.events["step"][3]["loss"] = None
    each = np.asarray(plots.loss(run).axes[0].lines[0].get_ydata())
    assert np.flatnonzero(np.isnan(each)).tolist() == [3]


def test_every_metric_of_every_split_has_its_line(run: Run) -> None:
    run.events["evaluate"].append({"step": 24, "split": "validation", "metrics": {"accuracy": 0.7}})
    lines = plots.accuracy(run).axes[0].lines
    assert {str(line.get_label()): len(np.asarray(line.get_xdata())) for line in lines} == {
        "test accuracy": 3,
        "test f1": 3,
        "validation accuracy": 1,
    }


def test_runs_are_compared_by_speed_up_and_metric(run: Run) -> None:
    unfinished = replace(run, summary={})
    figure = plots.compare({"elastic": run, "unfinished": unfinished})
    draw(figure)
    speed, quality = figure.axes
    assert [bar.get_width() for bar in speed.patches if isinstance(bar, Rectangle)] == [2.04, 0]
    assert [bar.get_width() for bar in quality.patches if isinstance(bar, Rectangle)] == [0.74, 0]
    assert [text.get_text() for text in speed.texts] == ["2.04", "-"]
    assert [label.get_text() for label in speed.get_yticklabels()] == ["elastic", "unfinished"]

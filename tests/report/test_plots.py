"""Figures of a run over its steps show what its events say."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch

from pipetransformer.report import plots
from pipetransformer.report.run_folder import Run, read_run
from pipetransformer.report.style import CACHED, COLOURS, FROZEN, fill


@pytest.fixture
def run(run_folder: Path) -> Run:
    return read_run(run_folder)


def shown(figure: Figure | None) -> Figure:
    assert figure is not None, "there is something to show"
    return figure


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


def drawn(axes: Axes) -> list[list[float | None]]:
    """What a panel shows of each block at each decision."""
    (mesh,) = [artist for artist in axes.collections if isinstance(artist, QuadMesh)]
    return np.ma.masked_invalid(np.ma.asarray(mesh.get_array())).T.tolist()


def test_frozen_blocks_are_blank_in_the_signals(run: Run) -> None:
    found = drawn(shown(plots.signals(run)).axes[0])
    assert found == [[0.1, 0.2, 0.4, 0.8, 1.6, 3.2], [None, None, 0.4, 0.8, 1.6, 3.2]]


def test_each_signal_has_a_panel_with_the_decisions_on_it(run: Run) -> None:
    for decision in run.events["decision"]:
        decision["signals"] = {"loss_drop": [-0.5, *[0.25] * 5], "step_share": [1.0] * 7}
    figure = shown(plots.signals(run))
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
    figure = shown(plots.signals(run))
    (cross,) = [line for line in figure.axes[0].lines if line.get_marker() == "X"]
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([20], [2.5])
    assert "taken back or held by the guard" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_layer_has_the_colour_of_its_stage_until_it_is_frozen_and_then_cached(run: Run) -> None:
    axes = plots.stages_over_time(run).axes[0]
    first, second, third, fourth = COLOURS[:4]
    colours = [[colour_at(axes, step, layer) for layer in range(8)] for step in (4, 12, 20)]
    assert colours == [
        [first, first, second, second, third, third, fourth, fourth],
        [FROZEN] * 3 + [first] * 2 + [second] * 3,
        [CACHED] * 5 + [first] * 3,
    ]


def test_no_two_of_many_stages_look_alike() -> None:
    assert len({fill(stage) for stage in range(64)}) == 64


def test_the_embedding_is_active_while_no_block_is_frozen(run: Run) -> None:
    assert colour_at(plots.stages_over_time(run).axes[0], 4, 0) == COLOURS[0]


def test_stages_and_replicas_stand_above_the_stretch_in_which_they_held(run: Run) -> None:
    texts = plots.stages_over_time(run).axes[0].texts
    above = [(text.get_position()[0], text.get_text()) for text in texts if "x" in text.get_text()]
    assert above == [(4, "4 x 1"), (12, "2 x 2"), (20, "1 x 4")]


def test_each_stage_is_named_where_its_active_layers_are(run: Run) -> None:
    texts = plots.stages_over_time(run).axes[0].texts
    names = [(*text.get_position(), text.get_text()) for text in texts if "x" not in text.get_text()]
    first = [(4, 0.5, "1"), (4, 2.5, "2"), (4, 4.5, "3"), (4, 6.5, "4")]
    assert names == [*first, (12, 3.5, "1"), (12, 6, "2"), (20, 6, "1")]


def test_stages_replicas_and_idle_devices_are_drawn_over_the_steps(run: Run) -> None:
    run.start["world_size"] = 5
    lines = [artist for artist in plots.devices(run).axes[0].patches if isinstance(artist, StepPatch)]
    found = {line.get_label(): list(line.get_data().values) for line in lines}
    assert found == {"stages of a replica": [4, 2, 1], "replicas": [1, 2, 4], "idle devices": [1, 1, 1]}
    assert all(list(line.get_data().edges) == [0, 8, 16, 24] for line in lines)


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
    run.events["evaluate"].append({"step": 24, "split": "validation", "metrics": {"accuracy": 0.7, "perplexity": 9.5}})
    small, large = shown(plots.metrics(run)).axes
    assert {str(line.get_label()): len(np.asarray(line.get_xdata())) for line in small.lines} == {
        "test accuracy": 3,
        "test f1": 3,
        "validation accuracy": 1,
    }
    assert [str(line.get_label()) for line in large.lines] == ["validation perplexity"]


def test_a_metric_below_zero_is_in_the_panel_without_bounds(run: Run) -> None:
    for event in run.events["evaluate"]:
        event["metrics"] = {"matthews": -0.1}
    assert [axes.get_ylabel() for axes in shown(plots.metrics(run)).axes] == ["metric"]


def test_a_signal_that_only_a_later_policy_asked_for_is_blank_before(run: Run) -> None:
    run.events["decision"][-1]["signals"] = {"loss_drop": [0.5] * 6}
    panels = [axes for axes in shown(plots.signals(run)).axes if axes.get_ylabel() == "block"]
    assert drawn(panels[1]) == [[None] * 6, [0.5] * 6]

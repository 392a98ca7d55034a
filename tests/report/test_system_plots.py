"""Figures of what the system did in a run show what its events and traces say."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch

from pipetransformer.report import system_plots
from pipetransformer.report.run_folder import Run, read_run
from pipetransformer.report.trace import CATEGORIES

from .conftest import PLANS, trace_of


@pytest.fixture
def run(run_folder: Path) -> Run:
    return read_run(run_folder)


def shown(figure: Figure | None) -> Figure:
    assert figure is not None, "there is something to show"
    return figure


def widths(axes: Axes) -> list[float]:
    return [patch.get_width() for patch in axes.patches if isinstance(patch, Rectangle)]


def test_the_parts_of_a_transition_lie_behind_each_other_beside_what_it_moved(run: Run) -> None:
    seconds, moved = shown(system_plots.transitions(run)).axes
    bars = [patch for patch in seconds.patches if isinstance(patch, Rectangle)]
    of_the_first = [(bar.get_x(), bar.get_width()) for bar in bars[::2]]  # part by part, each of both transitions
    assert np.array(of_the_first) == pytest.approx(
        np.array([(0, 0.02), (0.02, 0), (0.02, 0.11), (0.13, 1.2), (1.33, 0.6)])
    )
    assert widths(moved) == [3, 3]
    assert [text.get_text() for text in moved.texts] == ["3.0 in 5 moves", "3.0 in 5 moves"]
    assert [text.get_text() for text in seconds.texts] == ["1.9 s", "1.9 s"]
    assert [label.get_text() for label in seconds.get_yticklabels()] == [
        "step 8: 0 to 2 frozen",
        "step 16: 2 to 4 frozen",
    ]


def test_transitions_that_move_nothing_have_no_panel_for_it(run: Run) -> None:
    for transition in run.events["transition"]:
        transition["bytes_moved"] = 0
    (seconds,) = shown(system_plots.transitions(run)).axes
    assert "nothing was moved" in seconds.get_title(loc="left")


def test_the_parts_of_a_step_lie_behind_each_other_and_a_mark_shows_the_measured_end(run: Run) -> None:
    (axes,) = shown(system_plots.step_parts(run)).axes
    bars = np.array([(bar.get_x(), bar.get_width()) for bar in axes.patches if isinstance(bar, Rectangle)])
    first = [(0, 300), (300, 100)]
    assert bars.reshape(2, 3, 2) == pytest.approx(
        np.array([[np.divide(each, 1 + frozen) for frozen in (0, 2, 4)] for each in first])
    )
    assert axes.get_lines()[0].get_xdata() == pytest.approx(np.divide(500, [1, 3, 5]))
    assert axes.get_legend_handles_labels()[1] == ["measured", "active layers", "waiting for stages"], (
        "nothing is frozen"
    )
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "from step 0: 4 x 1, 0 frozen", "from step 8: 2 x 2, 2 frozen", "from step 16: 1 x 4, 4 frozen, 4 cached",
    ]  # fmt: skip


def test_steps_that_a_roll_back_loses_are_a_part_of_its_transition(run: Run) -> None:
    labels = [text.get_text() for text in shown(system_plots.transitions(run)).legends[0].get_texts()]
    assert "steps trained again" not in labels
    run.events["transition"][-1] |= {"lost_seconds": 5.0, "seconds": 6.0}
    figure = shown(system_plots.transitions(run))
    assert "steps trained again" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert figure.axes[0].patches[-1].get_width() == 5  # type: ignore[attr-defined]


def test_a_run_of_an_earlier_release_has_no_parts_of_a_step(run: Run) -> None:
    for plan in run.summary["plans"]:
        del plan["step_parts"]
    assert system_plots.step_parts(run) is None


def test_the_gain_lies_between_the_best_static_plan_and_the_limit(run: Run) -> None:
    (axes,) = shown(system_plots.gain(run)).axes
    assert widths(axes) == [1, 2.04, 2.42]
    assert [text.get_text() for text in axes.texts] == ["1.0", "2.0 (84% of the limit)", "2.4"]


def test_a_run_that_was_the_best_static_plan_has_no_gain_over_it(run: Run) -> None:
    run.summary["is_static"] = True
    assert system_plots.gain(run) is None


def test_the_cache_is_shown_by_its_level_its_bytes_and_the_waiting_for_it(run: Run) -> None:
    level, stored, waiting = shown(system_plots.cache(run)).axes
    assert list(np.asarray(level.lines[0].get_ydata())) == [0] * 16 + [4] * 8
    (stairs,) = [patch for patch in stored.patches if isinstance(patch, StepPatch)]
    assert (list(stairs.get_data().values), list(stairs.get_data().edges)) == ([0, 16], [0, 16, 24])
    assert np.asarray(waiting.lines[0].get_xydata()) == pytest.approx(np.array([(step, 4) for step in range(17, 25)]))


def test_a_step_of_each_plan_is_drawn_on_its_devices_at_its_times(run: Run) -> None:
    figure = shown(system_plots.timeline(run))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "plan from step 0: 4 stages x 1 replica, 0 frozen",
        "plan from step 8: 2 stages x 2 replicas, 2 frozen",
        "plan from step 16: 1 stage x 4 replicas, 4 frozen, 4 cached",
    ]
    for axes, held in zip(figure.axes, PLANS, strict=True):
        bars = [each for each in axes.collections if isinstance(each, PolyCollection)]
        drawn = [bar.get_paths()[0].get_extents().x0 for bar in bars]
        assert drawn == pytest.approx([event.start_s * 1000 for event in trace_of(held)])
        assert len(axes.get_yticks()) == len(held["stages"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*CATEGORIES]


def test_a_figure_without_room_for_all_says_what_it_shows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_plots, "MAX_TRANSITIONS", 1)
    monkeypatch.setattr(system_plots, "MAX_DEVICES", 2)
    titles = [
        shown(draw(run)).axes[0].get_title(loc="left")
        for draw in (system_plots.transitions, system_plots.step_parts, system_plots.timeline)
    ]
    assert titles == [
        "Transitions, the last 1 of 2",
        "A step by what it goes to, the last 1 of 3",
        "plan from step 0: 4 stages x 1 replica, 0 frozen, the first 2 of 4 devices",
    ]


def test_a_run_in_which_nothing_happened_has_no_such_figures(run: Run) -> None:
    for events in run.events.values():
        events[:] = [event for event in events if "num_steps" in event and "plan" in event]
    run.summary.clear()
    for trace in run.folder.glob("trace_*.json"):
        trace.unlink()
    figures = (system_plots.transitions, system_plots.gain, system_plots.cache, system_plots.timeline)
    assert [figure(run) for figure in figures] == [None] * 4

"""Runs side by side: those that differ by their seed are one arm, with the mean and its interval."""

import csv
import io
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console
from matplotlib.collections import LineCollection, PolyCollection

from pipetransformer.errors import UserError
from pipetransformer.report import __main__, comparison_plots
from pipetransformer.report import page as pages
from pipetransformer.report import sweep as sweep_table
from pipetransformer.report.__main__ import COMPARISON, CSV, main
from pipetransformer.report.comparison import (
    COLUMNS,
    Arm,
    find_runs,
    half_width,
    read_arms,
    share_interval,
    with_interval,
)
from pipetransformer.report.environment import write_overrides
from pipetransformer.report.event_log import EVENT_LOG, SUMMARY
from pipetransformer.report.figures import OF_A_RUN, OF_ARMS
from pipetransformer.report.run_folder import CONFIG
from pipetransformer.report.sweep import print_sweep

RESULTS = {("freeze=none", 1): 0.75, ("freeze=none", 2): 0.85, ("freeze=alpha", 1): 0.7}


@pytest.fixture
def sweep(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three jobs: two seeds of one arm, one of another."""
    root = tmp_path_factory.mktemp("sweep")
    for number, ((freeze, seed), value) in enumerate(RESULTS.items()):
        job = Path(shutil.copytree(run_folder, root / str(number)))
        write_overrides(job, ["epochs=3", freeze, f"seed={seed}", f"hydra.run.dir={number}"])
        (job / CONFIG).write_text(f"seed: {seed}\nfreeze:\n  kind: {freeze}\n")
        change(job, metric={"name": "accuracy", "value": value, "split": "test", "num_samples": 1000})
    return root


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the figures out of pages: they take longest."""
    monkeypatch.setattr(pages, "FIGURES", ())
    monkeypatch.setattr(pages, "COMPARISONS", ())


def change(job: Path, **values: Any) -> None:
    summary = json.loads((job / SUMMARY).read_text())
    (job / SUMMARY).write_text(json.dumps(summary | values))


def change_events(job: Path, name: str, changed: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Changes the events of a name in a log, or removes them."""
    events = [json.loads(line) for line in (job / EVENT_LOG).read_text().splitlines()]
    kept = [changed(event) if event["event"] == name else event for event in events]
    (job / EVENT_LOG).write_text("".join(f"{json.dumps(event)}\n" for event in kept if event))


def change_evaluations(job: Path, accuracy: float, num_samples: int = 1000) -> None:
    change_events(
        job, "evaluate", lambda event: event | {"metrics": {"accuracy": accuracy}, "num_samples": num_samples}
    )


def arms_of(folder: Path) -> list[Arm]:
    arms, problems = read_arms(find_runs(str(folder)))
    assert not problems
    return arms


def test_seeds_are_one_row_with_their_mean_and_its_interval(sweep: Path) -> None:
    rows = [dict(zip(COLUMNS, arm.row(), strict=True)) for arm in arms_of(sweep)]
    assert [(row["arm"], row["runs"], row["result"]) for row in rows] == [
        ("freeze=none", "2 (0, 1)", "accuracy 0.8 ± 0.64"),  # t(0.975, 1) = 12.71, s / sqrt(2) = 0.05
        ("freeze=alpha", "1 (2)", "accuracy 0.7"),
    ]
    assert rows[0]["training time"] == "12m23s"
    assert (rows[0]["limit reached"], rows[0]["frozen"], rows[0]["cache hits"]) == ("84%", "33%", "95%")


def rows_of(folder: Path) -> list[dict[str, str]]:
    return [dict(zip(COLUMNS, arm.row(), strict=True)) for arm in arms_of(folder)]


def test_repeats_of_a_seed_are_not_independent(sweep: Path) -> None:
    (sweep / "1" / CONFIG).write_text("seed: 1\nfreeze:\n  kind: freeze=none\n")
    assert [row["result"] for row in rows_of(sweep)] == ["accuracy 0.8", "accuracy 0.7"]
    change_evaluations(sweep / "0", 0.5)
    change_evaluations(sweep / "1", 0.7)
    figure = comparison_plots.metric_over_time(arms_of(sweep))
    assert figure is not None
    axes = figure.axes[0]
    assert np.asarray(axes.lines[0].get_ydata()) == pytest.approx([0.6, 0.6, 0.6])
    assert not [each for each in axes.collections if isinstance(each, PolyCollection)], "one seed has no band"


def test_a_run_whose_metric_is_no_number_is_missed(sweep: Path) -> None:
    change(sweep / "0", metric={"name": "accuracy", "value": None, "split": "test", "num_samples": 1000})
    assert [row["result"] for row in rows_of(sweep)] == ["accuracy 0.85 (1 of 2 runs)", "accuracy 0.7"]


def test_runs_on_other_numbers_of_devices_are_other_arms(sweep: Path) -> None:
    """As torchrun has decided, which no option tells."""
    change_events(sweep / "1", "start", lambda event: event | {"world_size": 7})
    for job in "012":
        file = sweep / job / CONFIG
        file.write_text(f"{file.read_text()}parallel:\n  world_size: null\n")
    names = [row["arm"] for row in rows_of(sweep)]
    assert [name.split()[0] for name in names] == ["freeze=none", "freeze=none", "freeze=alpha"]
    assert names[1].split()[1] == "parallel.world_size=7"


def test_an_interval_is_that_of_students_t() -> None:
    assert half_width([1.0]) is None
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.30265 / np.sqrt(3), abs=1e-5)
    assert with_interval([]) == "-"


def test_a_share_has_the_interval_of_wilson() -> None:
    assert share_interval(0.9, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    assert share_interval(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert share_interval(0.5, 0) == (0.5, 0.5)


def test_a_share_lies_in_its_interval_also_at_the_ends() -> None:
    for num_samples in range(1, 2000):
        for share in (0.0, 1.0):
            low, high = share_interval(share, num_samples)
            assert 0 <= low <= share <= high <= 1, "rounding would put an end on the other side"


@pytest.mark.parametrize(("value", "num_samples"), [(1.0, 360), (0.0, 1000), (74.0, 100)])
def test_a_run_that_is_always_right_or_wrong_or_scored_in_percent_is_drawn(
    sweep: Path, value: float, num_samples: int
) -> None:
    change_evaluations(sweep / "2", accuracy=value, num_samples=num_samples)
    figure = comparison_plots.metric_over_time([arms_of(sweep)[1]])
    assert figure is not None
    assert [*np.asarray(figure.axes[0].lines[0].get_ydata())] == [value] * 3


def test_runs_of_the_same_settings_are_one_arm_however_they_were_written(sweep: Path) -> None:
    """A default that is spelled out, and other blanks in a value."""
    write_overrides(sweep / "0", ["epochs=3", "++model.options={depth:2}", "seed=1"])
    write_overrides(sweep / "1", ["epochs=3", "+model.options={depth: 2}", "freeze=none", "seed=2"])
    write_overrides(sweep / "2", ["epochs=3", "freeze=alpha"])
    assert [(arm.name, len(arm.runs)) for arm in arms_of(sweep)] == [
        ("model.options={depth:2}", 2),
        ("freeze=alpha", 1),
    ]


def test_an_option_that_is_alike_in_all_runs_is_in_no_name(sweep: Path) -> None:
    for number, text in enumerate(("{depth:2}", "{depth: 2}", "{depth:  2}")):
        file = sweep / str(number) / CONFIG
        file.write_text(f"{file.read_text()}model:\n  options:\n    depth: 2\n")
        write_overrides(
            sweep / str(number), [f"++model.options={text}", "freeze=alpha" if number == 2 else "freeze=none"]
        )
    assert [arm.name for arm in arms_of(sweep)] == ["freeze=none", "freeze=alpha"]


def test_a_run_that_went_on_with_other_devices_has_their_number_alone(sweep: Path) -> None:
    write_overrides(sweep / "1", ["epochs=3", "freeze=none", "seed=2", "parallel.world_size=7"])
    with (sweep / "1" / EVENT_LOG).open("a") as log:
        start = next(json.loads(line) for line in (sweep / "1" / EVENT_LOG).read_text().splitlines())
        log.write(json.dumps(start | {"event": "resume", "step": 1, "world_size": 5, "time": "9999"}) + "\n")
    names = [row["arm"] for row in rows_of(sweep)]
    assert sorted(names[1].split()) == ["freeze=none", "parallel.world_size=5"]


def test_gains_of_a_part_of_a_run_count_with_nobodys(sweep: Path) -> None:
    steps = rows_of(sweep) and json.loads((sweep / "0" / SUMMARY).read_text())["optimizer_steps"]
    change(sweep / "0", compared_steps=steps, speedup_vs_static=3.0)
    for job in "12":
        change(sweep / job, compared_steps=steps - 1)
    assert [row["speed-up"] for row in rows_of(sweep)] == ["3.0 predicted", "of a part alone"]


def test_options_that_change_no_result_make_no_arm(sweep: Path) -> None:
    write_overrides(sweep / "1", ["epochs=3", "freeze=none", "seed=2", "logger.mode=online", "+hydra.verbose=true"])
    write_overrides(sweep / "2", ["epochs=3"])
    assert [arm.name for arm in arms_of(sweep)] == ["freeze=none", "default"]


def test_of_an_option_that_is_given_twice_the_last_one_counts(sweep: Path) -> None:
    write_overrides(sweep / "1", ["epochs=3", "freeze=alpha", "seed=2", "freeze=none"])
    write_overrides(sweep / "2", ["epochs=3", "freeze=none", "freeze=alpha"])
    assert [arm.name for arm in arms_of(sweep)] == ["freeze=none", "freeze=alpha"]


def test_runs_of_python_are_told_apart_by_their_settings(sweep: Path) -> None:
    (sweep / "2" / "overrides.json").unlink()
    assert [arm.name for arm in arms_of(sweep)] == ["freeze.kind=freeze=none", "freeze.kind=freeze=alpha"]


def test_runs_are_found_at_any_depth_by_globs_and_once(sweep: Path) -> None:
    shutil.copytree(sweep / "2", sweep / "10")
    assert [path.name for path in find_runs(str(sweep))] == ["0", "1", "2", "10"]
    assert len(find_runs(f"{sweep / '[01]'},{sweep}")) == 4
    with pytest.raises(UserError, match=r"runs=.*nothing holds no run"):
        find_runs(str(sweep / "nothing"))


@pytest.mark.parametrize("name", ["lr[1e-3]", "freeze=none,seed=1", "my runs", "what?", "it's"])
def test_a_sweep_may_have_a_folder_of_any_name(
    sweep: Path, name: str, capsys: pytest.CaptureFixture[str], without_figures: None
) -> None:
    folder = sweep.rename(sweep.with_name(name))
    try:
        print_sweep(folder)
        first, *_, command = capsys.readouterr().out.splitlines()
        assert first == "jobs of the sweep: 3 runs in 2 arms"
        main(shlex.split(command.removeprefix("as a page with figures: "))[1:])
        assert (folder / COMPARISON).is_file()
    finally:
        shutil.rmtree(folder)


def test_the_command_writes_table_page_and_csv(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "FIGURES", OF_A_RUN[2:4])
    monkeypatch.setattr(pages, "COMPARISONS", OF_ARMS[:3])
    main([f"runs={sweep}"])
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:3] == ["arm", "runs", "result"]
    assert out[1].split()[:6] == ["freeze=none", "2", "(0,", "1)", "accuracy", "0.8"]
    assert out[-2:] == [str(sweep / CSV), str(sweep / COMPARISON)]
    html = (sweep / COMPARISON).read_text()
    assert html.count("data:image/png;base64,") == 3 + 2 * 2, "of all arms, and of a run of each"
    assert len(re.findall(f"<summary>freeze=(none|alpha): {sweep}", html)) == 2
    assert not re.search(r"(href|src)=\"(?!data:|#)", html), "it needs no other file"
    with (sweep / CSV).open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["arm"], int(row["seed"]), float(row["value"])) for row in rows] == [
        (*key, value) for key, value in RESULTS.items()
    ]
    assert {row["is_static"] for row in rows} == {"False"}, "a run that is has no speed-up to speak of"


def test_the_table_at_the_end_of_a_sweep_is_that_of_the_command(
    sweep: Path, capsys: pytest.CaptureFixture[str], without_figures: None
) -> None:
    print_sweep(sweep)
    first, *table, folders, command = capsys.readouterr().out.splitlines()
    main([f"runs={sweep}"])
    assert capsys.readouterr().out.splitlines()[: len(table)] == table
    assert first == "jobs of the sweep: 3 runs in 2 arms"
    assert folders == f"folders: {sweep}/<job>"
    assert command == f"as a page with figures: pipetransformer-report runs={sweep}"


def test_figures_of_all_arms_and_of_a_run_of_each_become_files(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_figures: None
) -> None:
    monkeypatch.setattr(__main__, "OF_A_RUN", OF_A_RUN[3:4])
    monkeypatch.setattr(__main__, "OF_ARMS", OF_ARMS[1:2])
    main([f"runs={sweep}", f"figures={tmp_path / 'figures'}"])
    found = sorted(str(file.relative_to(tmp_path / "figures")) for file in (tmp_path / "figures").rglob("*.svg"))
    assert found == ["arm_1/devices.svg", "arm_2/devices.svg", "gain.svg"]


def test_a_comparison_replaces_an_earlier_table_and_no_file_of_the_users(sweep: Path, without_figures: None) -> None:
    for _ in range(2):
        main([f"runs={sweep}"])
    (sweep / COMPARISON).unlink()
    (sweep / CSV).write_text("name,value\nmine,1\n")
    with pytest.raises(SystemExit, match=rf"{CSV} is there, and is no table of this command; move it away, or .* out="):
        main([f"runs={sweep}"])
    assert (sweep / CSV).read_text() == "name,value\nmine,1\n"
    assert not (sweep / COMPARISON).exists()


def test_a_run_that_failed_before_its_first_plan_is_in_the_table(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(sweep / "0")
    (sweep / "1" / EVENT_LOG).write_text("")
    (sweep / "1" / SUMMARY).write_text('{"status": "failed", "error": "no plan fits"}')
    (sweep / "2" / EVENT_LOG).unlink()
    (sweep / "2" / SUMMARY).write_text('{"status": "interrupted"}')
    main([f"runs={sweep}"])
    rows, told = (lines := capsys.readouterr().out.splitlines())[1:3], lines[3]
    assert [row.split() for row in rows] == [
        ["freeze=none", "1", "(1)", *["-"] * 8, "failed"],
        ["freeze=alpha", "1", "(2)", *["-"] * 8, "interrupted"],
    ]
    assert told == f"failed: {sweep / '1'}: no plan fits"
    html = (sweep / COMPARISON).read_text()
    assert all(words in html for words in (*(drawing.absent for drawing in OF_ARMS), "<td>no plan fits</td>"))
    with (sweep / CSV).open() as table:
        assert [row["error"] for row in csv.DictReader(table)] == ["no plan fits", ""]


def test_a_run_that_cannot_be_read_is_left_out_aloud(
    sweep: Path, capsys: pytest.CaptureFixture[str], without_figures: None
) -> None:
    (sweep / "1" / EVENT_LOG).write_text("")
    (sweep / "1" / SUMMARY).unlink()
    main([f"runs={sweep}", f"out={sweep / 'out'}"])
    assert f"left out: {sweep / '1' / EVENT_LOG} has no start event" in capsys.readouterr().out
    assert (sweep / "out" / COMPARISON).is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "b"], "a b: give the folder of one run, or runs="),
        (["a", "runs=b"], "give the folder of one run, or runs="),
        (["a", "run=b"], "give the folder of one run, or runs="),
        (["rns=a"], "rns does not exist; did you mean runs?"),
        (["a", "step=12"], "step does not exist; valid options: run, runs, out, figures"),
        (["--hlp"], "--hlp is not an option; did you mean --help?"),
        (["a", "--out=b"], "--out=b is not an option; write out=b"),
        (["a", "--figure"], "--figure is not an option; write figures=<value>"),
        (["a", "-x"], "-x is not an option; --help lists them"),
        (["runs=/nowhere"], "runs=/nowhere holds no run"),
        (["/nowhere"], "is not a run folder"),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert words in str(stopped.value)
    assert "\n" not in str(stopped.value)


def test_the_metric_is_drawn_over_the_seconds_of_training_with_the_interval(sweep: Path) -> None:
    change_evaluations(sweep / "0", 0.5)
    change_evaluations(sweep / "1", 0.7)
    arms = arms_of(sweep)
    run = arms[0].runs[0]
    figure = comparison_plots.metric_over_time(arms)
    assert figure is not None
    axes = figure.axes[0]
    line, other = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    seconds = [sum(step["step_seconds"] for step in run.events["step"][:until]) for until in (8, 16, 24)]
    spent = np.cumsum([0, *(transition["seconds"] for transition in run.events["transition"])])
    assert np.asarray(line.get_xdata()) == pytest.approx(np.add(seconds, spent))
    assert np.asarray(line.get_ydata()) == pytest.approx([0.6, 0.6, 0.6])
    for part in ("color", "linestyle", "marker"):
        assert getattr(line, f"get_{part}")() != getattr(other, f"get_{part}")()
    band = next(each for each in axes.collections if isinstance(each, PolyCollection)).get_paths()[0].vertices
    half = half_width([0.5, 0.7])
    assert half is not None
    assert [np.asarray(band)[:, 1].min(), np.asarray(band)[:, 1].max()] == pytest.approx([0.6 - half, 0.6 + half])
    bars = [each for each in axes.collections if isinstance(each, LineCollection)]
    ends = [np.asarray(segment)[:, 1].tolist() for segment in bars[-1].get_segments()]
    assert ends == [pytest.approx(share_interval(value, 1000)) for value in (0.58, 0.66, 0.74)], "of a single run"


def test_dollars_in_an_option_begin_no_formula(sweep: Path) -> None:
    write_overrides(sweep / "2", [r"dataset.path=$\frac{$", "seed=1"])
    for drawing in OF_ARMS:
        figure = drawing.draw(arms_of(sweep))
        if figure is not None:
            figure.savefig(io.BytesIO())  # where a formula would be read


def test_plans_are_drawn_over_the_steps(sweep: Path) -> None:
    figure = comparison_plots.plans_over_steps(arms_of(sweep))
    assert figure is not None
    found = [axes.patches[0].get_data() for axes in figure.axes]  # type: ignore[attr-defined]
    assert all(data.edges.tolist() == [0, 8, 16, 24] for data in found)
    frozen, stages, replicas, idle = (data.values.tolist() for data in found)
    assert frozen == pytest.approx([0, 2 / 6, 4 / 6])
    assert (stages, replicas, idle) == ([4, 2, 1], [1, 2, 4], [0, 0, 0])
    assert [tick for tick in figure.axes[3].get_yticks() if tick % 1] == [], "also where no device is idle"


def test_caches_are_compared_by_hits_bytes_and_waiting(sweep: Path) -> None:
    change(sweep / "2", cache={})
    arms = arms_of(sweep)
    figure = comparison_plots.cache(arms)
    assert figure is not None
    widths = [[patch.get_width() for patch in axes.patches] for axes in figure.axes]  # type: ignore[attr-defined]
    assert widths == [[95], [16], [pytest.approx(0.03)]], "of the one arm that has a cache"
    assert comparison_plots.cache(arms[1:]) is None


def test_runs_without_evaluations_are_compared_too(sweep: Path, without_figures: None) -> None:
    for job in sweep.iterdir():
        lines = [line for line in (job / EVENT_LOG).read_text().splitlines() if '"evaluate"' not in line]
        (job / EVENT_LOG).write_text("\n".join(lines) + "\n")
        (job / SUMMARY).unlink()
    main([f"runs={sweep}"])
    assert [arm.row()[2] for arm in arms_of(sweep)] == ["-", "-"]


def legend_of(arms: list[Arm]) -> list[str]:
    figure = comparison_plots.metric_over_time(arms)
    assert figure is not None
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_run_that_evaluated_less_takes_nothing_from_the_others_of_its_arm(sweep: Path) -> None:
    change_events(sweep / "1", "evaluate", lambda event: event if event["step"] < 10 else None)
    arms = arms_of(sweep)
    figure = comparison_plots.metric_over_time(arms)
    assert figure is not None
    assert len(np.asarray(figure.axes[0].lines[0].get_xdata())) == 3
    band = next(each for each in figure.axes[0].collections if isinstance(each, PolyCollection)).get_paths()[0].vertices
    seconds = np.asarray(figure.axes[0].lines[0].get_xdata())
    assert np.asarray(band)[:, 0].max() < seconds[1], "one run alone has no interval"
    change_events(sweep / "1", "evaluate", lambda _: None)
    assert legend_of(arms_of(sweep)) == ["freeze=none (1 of 2 runs)", "freeze=alpha"]


def test_an_arm_that_cannot_be_drawn_is_named(sweep: Path) -> None:
    change_events(sweep / "2", "evaluate", lambda event: event | {"metrics": {"loss": 2.0}})
    assert legend_of(arms_of(sweep)) == ["freeze=none (2 runs)", "freeze=alpha: no test accuracy"]


def test_the_figure_is_of_the_metric_of_most_arms_whichever_comes_first(sweep: Path) -> None:
    shutil.copytree(sweep / "2", sweep / "3")
    write_overrides(sweep / "3", ["epochs=3", "freeze=linear"])
    (sweep / "3" / CONFIG).write_text("seed: 1\nfreeze:\n  kind: freeze=linear\n")
    for job in "01":
        change(sweep / job, metric={"name": "f1", "value": 0.5, "split": "articles", "num_samples": 9})
    figure = comparison_plots.metric_over_time(arms_of(sweep))
    assert figure is not None
    assert figure.axes[0].get_ylabel() == "test accuracy"
    figure = comparison_plots.metric_over_time(arms_of(sweep)[:2])
    assert figure is not None
    assert figure.axes[0].get_ylabel() == "articles f1", "the first of as many"


def test_a_run_without_a_summary_is_drawn_by_the_metric_that_was_asked_for(sweep: Path) -> None:
    for job in sweep.iterdir():
        change_events(job, "start", lambda event: event | {"main_metric": {"name": "f1", "split": "test"}})
        (job / SUMMARY).unlink()
    figure = comparison_plots.metric_over_time(arms_of(sweep))
    assert figure is not None
    assert figure.axes[0].get_ylabel() == "test f1"


def test_runs_that_were_the_best_static_plan_have_no_speed_up_over_it(sweep: Path) -> None:
    for job in ("0", "1"):
        change(sweep / job, is_static=True, speedup_vs_static=0.6)
    arms = arms_of(sweep)
    rows = [dict(zip(COLUMNS, arm.row(), strict=True)) for arm in arms]
    assert [row["speed-up"] for row in rows] == ["best static plan", "2.0 predicted"]
    assert [row["limit reached"] for row in rows] == ["-", "84%"]
    figure = comparison_plots.gain(arms)
    assert figure is not None
    assert [text.get_text() for axes in figure.axes for text in axes.texts] == ["2.0", "84"]
    change(sweep / "1", is_static=False)
    assert arms_of(sweep)[0].gains("speedup_vs_static") == [0.6]
    assert comparison_plots.gain(arms_of(sweep / "0")) is None


def test_runs_that_did_not_complete_take_no_part_in_the_means(sweep: Path) -> None:
    change(sweep / "1", status="failed", train_seconds=0.0, mean_frozen_fraction=0.0, speedup_vs_static=None)
    change(sweep / "0", speedup_is="measured")
    change(sweep / "2", status="failed", optimizer_steps=0, train_seconds=0.0)
    rows = [dict(zip(COLUMNS, arm.row(), strict=True)) for arm in arms_of(sweep)]
    assert [row["training time"] for row in rows] == ["12m23s", "-"]
    assert (rows[0]["result"], rows[0]["status"]) == ("accuracy 0.75", "1 completed, 1 failed")
    assert rows[0]["speed-up"] == "2.0 measured", "the run that failed says nothing of it"


def test_a_run_whose_model_could_not_be_written_is_told_in_its_row(sweep: Path) -> None:
    change(sweep / "1", error="the model takes 1 GiB and could not be saved in model")
    arms, _ = read_arms(find_runs(str(sweep)))
    row = dict(zip(COLUMNS, arms[0].row(), strict=True))
    assert (row["result"], row["status"]) == ("accuracy 0.8 ± 0.64", "1 completed, 1 completed without a model")


@pytest.mark.parametrize("width", [80, 120, 160, 200])
def test_no_cell_of_the_table_is_cut(sweep: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    change(sweep / "1", status="diverged")
    rows = [arm.row() for arm in arms_of(sweep)]
    console = rich.console.Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    monkeypatch.setattr(sweep_table, "_console", lambda: console)
    sweep_table.print_table(COLUMNS, rows)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    for row in rows:
        assert all(cell in shown for cell in row), shown


def test_an_option_without_spaces_that_is_wider_than_its_column_is_broken(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [arm.row() for arm in arms_of(sweep)]
    console = rich.console.Console(width=200, file=io.StringIO(), force_terminal=True, color_system=None)
    monkeypatch.setattr(sweep_table, "_console", lambda: console)
    name = f"model.name=/{'folder/' * 20}end"
    sweep_table.print_table(COLUMNS, [(name, *rows[0][1:]), *rows[1:]])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    broken = [line.split()[0] for line in lines if "folder/" in line]
    assert "".join(broken).startswith("model.name=/folder/")
    assert "…" not in "".join(lines)


def test_a_run_with_impossible_values_is_left_out_by_its_folder(
    sweep: Path, capsys: pytest.CaptureFixture[str], without_figures: None
) -> None:
    change(sweep / "1", train_seconds="long")
    (sweep / "2" / "overrides.json").write_text("{}")
    main([f"runs={sweep}", f"out={sweep / 'out'}"])
    shown = capsys.readouterr().out
    assert f"left out: {sweep / '1'} holds values that a run does not write" in shown
    assert f"left out: {sweep / '2' / 'overrides.json'} is damaged" in shown
    assert "1 (0)" in shown


def test_markup_of_the_user_stays_text_on_a_comparison_too(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FIGURES", ())
    monkeypatch.setattr(pages, "COMPARISONS", ())
    write_overrides(sweep / "2", ["model.name=<b>x"])
    change_events(sweep / "2", "transition", lambda event: event | {"choice": "<i>y", "predicted_gain_s": 0.0})
    change_events(sweep / "2", "decision", lambda event: event | {"reason": "<u>z"})
    html = pages.comparison_page(arms_of(sweep))
    for tag in ("<b>", "<i>", "<u>"):
        assert tag not in html
        assert tag.replace("<", "&lt;").replace(">", "&gt;") in html

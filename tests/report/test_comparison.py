"""Runs side by side: those that differ by their seed are one arm, with the mean and its interval."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipetransformer.errors import UserError
from pipetransformer.report import comparison_plots
from pipetransformer.report.__main__ import COMPARISON, CSV, main
from pipetransformer.report.comparison import COLUMNS, Arm, find_runs, half_width, read_arms, with_interval
from pipetransformer.report.run_folder import CONFIG, EVENT_LOG, SUMMARY, write_overrides

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


def change(job: Path, **values: Any) -> None:
    summary = json.loads((job / SUMMARY).read_text())
    (job / SUMMARY).write_text(json.dumps(summary | values))


def arms_of(folder: Path) -> list[Arm]:
    arms, problems = read_arms(find_runs(str(folder)))
    assert not problems
    return arms


def test_seeds_are_one_row_with_their_mean_and_its_interval(sweep: Path) -> None:
    rows = [dict(zip(COLUMNS, arm.row(), strict=True)) for arm in arms_of(sweep)]
    assert [(row["arm"], row["runs"], row["result"]) for row in rows] == [
        ("freeze=none", "2", "accuracy 0.8 ± 0.64"),  # t(0.975, 1) = 12.71, s / sqrt(2) = 0.05
        ("freeze=alpha", "1", "accuracy 0.7"),
    ]
    assert rows[0]["training time"] == "12m23s"
    assert (rows[0]["limit reached"], rows[0]["frozen"], rows[0]["cache hits"]) == ("84%", "33%", "-")


def test_an_interval_is_that_of_students_t() -> None:
    assert half_width([1.0]) is None
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.30265 / np.sqrt(3), abs=1e-5)
    assert with_interval([]) == "-"


def test_runs_of_python_are_told_apart_by_their_settings(sweep: Path) -> None:
    (sweep / "2" / "overrides.json").unlink()
    assert [arm.name for arm in arms_of(sweep)] == ["freeze.kind=freeze=none", "freeze.kind=freeze=alpha"]


def test_runs_are_found_at_any_depth_by_globs_and_once(sweep: Path) -> None:
    shutil.copytree(sweep / "2", sweep / "10")
    assert [path.name for path in find_runs(str(sweep))] == ["0", "1", "2", "10"]
    assert len(find_runs(f"{sweep / '[01]'},{sweep}")) == 4
    with pytest.raises(UserError, match=r"runs=.*nothing holds no run"):
        find_runs(str(sweep / "nothing"))


def test_the_command_writes_table_page_and_csv(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([f"runs={sweep}"])
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:3] == ["arm", "runs", "result"]
    assert out[1].split()[:5] == ["freeze=none", "2", "accuracy", "0.8", "±"]
    assert out[-2:] == [str(sweep / CSV), str(sweep / COMPARISON)]
    html = (sweep / COMPARISON).read_text()
    assert html.count("data:image/png;base64,") == 3 + 2 * 5, "of all arms, and of a run of each"
    assert html.count("<details>") == 2
    assert not re.search(r"(href|src)=\"(?!data:)", html), "it needs no other file"
    with (sweep / CSV).open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["arm"], int(row["seed"]), float(row["value"])) for row in rows] == [
        (*key, value) for key, value in RESULTS.items()
    ]


def test_a_run_that_cannot_be_read_is_left_out_aloud(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sweep / "1" / EVENT_LOG).write_text("")
    main([f"runs={sweep}", f"out={sweep / 'out'}"])
    assert f"left out: {sweep / '1' / EVENT_LOG} has no start event" in capsys.readouterr().out
    assert (sweep / "out" / COMPARISON).is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "b"], "a b: give the folder of one run, or runs="),
        (["a", "runs=b"], "give the folder of one run, or runs="),
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
    arms = arms_of(sweep)
    run = arms[0].runs[0]
    axes = comparison_plots.metric_over_time(arms).axes[0]
    line = axes.lines[0]
    seconds = [sum(step["step_seconds"] for step in run.events["step"][:until]) for until in (8, 16, 24)]
    spent = np.cumsum([0, *(transition["seconds"] for transition in run.events["transition"])])
    assert np.asarray(line.get_xdata()) == pytest.approx(np.add(seconds, spent))
    assert np.asarray(line.get_ydata()) == pytest.approx([0.58, 0.66, 0.74])
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 2
    assert axes.get_xlabel() == "training, s"


def test_the_frozen_part_is_drawn_over_the_steps(sweep: Path) -> None:
    stairs = comparison_plots.frozen_over_steps(arms_of(sweep)).axes[0].patches[0]
    data = stairs.get_data()  # type: ignore[attr-defined]
    assert data.edges.tolist() == [0, 8, 16, 24]
    assert data.values.tolist() == pytest.approx([0, 2 / 6, 4 / 6])


def test_runs_without_evaluations_are_compared_too(sweep: Path) -> None:
    for job in sweep.iterdir():
        lines = [line for line in (job / EVENT_LOG).read_text().splitlines() if '"evaluate"' not in line]
        (job / EVENT_LOG).write_text("\n".join(lines) + "\n")
        (job / SUMMARY).unlink()
    main([f"runs={sweep}"])
    assert [arm.row()[2] for arm in arms_of(sweep)] == ["-", "-"]

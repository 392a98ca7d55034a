"""The ablation's table says what the runs of a sweep say."""

import json
from pathlib import Path

import pytest
import yaml

from experiments.arms import table
from experiments.components.table import ARMS, BASELINE, COLUMNS, figures, main, read_sweep

PLAN = {"num_frozen": 2, "cache_level": 2, "stages": [[3, 5], [6, 7]], "num_replicas": 2, "num_microbatches": 4}
START = {"event": "start", "time": "2026-01-01T00:00:00.000+00:00", "world_size": 4}


def write_run(sweep: Path, number: int, arm: str, seed: int, seconds: float, status: str = "completed") -> None:
    """A run folder as a job of a sweep leaves it, as far as the table reads it."""
    folder = sweep / str(number)
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.dump([f"seed={seed}", f"experiment={arm}"]))
    (folder / "config.yaml").write_text(yaml.dump({"seed": seed}))
    (folder / "metrics.jsonl").write_text(json.dumps(START | {"plan": PLAN}) + "\n")
    figures = {"speedup_vs_static": 1.5, "limit": 3.0, "share_of_limit": 0.5, "mean_frozen_fraction": 0.25}
    metric = {"name": "accuracy", "value": seed / 10}
    summary = {"status": status, "metric": metric, "train_seconds": seconds, **figures}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two arms and three seeds; the machine was ten times as slow during the third seed."""
    baseline_s, all_s = (10.0, 12.0, 100.0), (5.0, 4.0, 40.0)
    for seed in (1, 2, 3):
        write_run(tmp_path, seed, "components/all", seed, all_s[seed - 1])
        write_run(tmp_path, 10 + seed, "components/baseline", seed, baseline_s[seed - 1])
    return tmp_path


def rows(sweep: Path) -> list[list[str]]:
    """The cells of each row of the sweep's table."""
    written = table(read_sweep(sweep), COLUMNS, BASELINE).splitlines()[2:]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in written]


def test_ratios_compare_runs_of_one_seed_so_that_a_slow_hour_falls_on_both(sweep: Path) -> None:
    cells = {row[0]: dict(zip((name for name, _ in COLUMNS), row, strict=True)) for row in rows(sweep)}
    assert cells["all"]["times as fast as no freezing"] == "2.50"  # of 2, 3 and 2.5
    assert cells["no freezing"]["times as fast as no freezing"] == "1.00"
    assert cells["all"]["training, s"] == "5.0"
    assert cells["all"]["accuracy, mean (min-max)"] == "0.200 (0.100-0.300)"
    assert (cells["all"]["share of limit"], cells["all"]["mean frozen"]) == ("50%", "25%")


def test_arms_stand_in_the_order_of_the_paper(sweep: Path) -> None:
    assert [row[0] for row in rows(sweep)] == [ARMS["baseline"], ARMS["all"]]


def test_the_plans_of_a_run_are_kept(sweep: Path) -> None:
    assert figures(read_sweep(sweep)[0])["plans"] == ("2f 2c 2x2 m4",)


@pytest.mark.parametrize(
    ("arm", "seed", "status", "message"),
    [
        ("components/all", 2, "failed", r"9 \(all\) is failed; run it again"),
        ("components/all", 4, "completed", r"no experiment=components/baseline with seed \[4\]"),
        ("components/other", 1, "completed", "is no arm of this experiment"),
        ("another", 1, "completed", "is no arm of this experiment"),
    ],
)
def test_a_sweep_that_does_not_compare_is_refused(
    sweep: Path, arm: str, seed: int, status: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(sweep, 9, arm, seed, 1.0, status)
    with pytest.raises(ValueError, match=message):
        read_sweep(sweep)
    with pytest.raises(SystemExit):
        main([str(sweep)])
    assert "Traceback" not in capsys.readouterr().err


def test_a_sweep_that_kept_no_overrides_is_refused_with_the_remedy(sweep: Path) -> None:
    (sweep / "1" / ".hydra" / "overrides.yaml").unlink()
    with pytest.raises(ValueError, match=r"run the sweep with hydra\.output_subdir=\.hydra"):
        read_sweep(sweep)


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run; give the hydra\.sweep\.dir"):
        read_sweep(tmp_path)

"""The first steps of each plan are held against the prediction, and against static plans where a run is asked to."""

import re
import shutil
from pathlib import Path
from statistics import median

import pytest
from support.jobs import TINY, Job, run_job
from support.plan_times import play_with_step_times
from support.pool import Pool

from pipetransformer.checkpoint.folder import FOLDER

RUN = (*TINY, "precision=float64", "epochs=12", "cache=off", "freeze=none")  # 48 steps of 16 samples
TARGET = "freeze.target_seconds=4000"  # without freezing they are predicted to take 48 times 88 s
AS_PREDICTED = {"data": 24.0, "single": 48.0, "pipeline": 40.0, "hybrid": 40.0}  # a second per layer and sample

SLOW = AS_PREDICTED | {"data": 1e4}  # of all predicted to be the fastest
KEEP = "checkpoint.keep=99"  # epochs that end while one is written are left out, or not
SAVED, BASELINE = ("checkpoint.every_steps=20", KEEP), ("baseline=true", "checkpoint.every_steps=10", KEEP)


@pytest.fixture(scope="module")
def on_one_device(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(pool, 1, tmp_path_factory.mktemp("jobs") / "reference", *RUN)


def run_with_times(pool: Pool, folder: Path, seconds: dict[str, float], *overrides: str) -> Job:
    folder.mkdir()
    assert set(pool.run(2, play_with_step_times, (*RUN, *overrides), folder, seconds)) == {""}
    return Job(folder, "")


@pytest.fixture(scope="module")
def slow(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_with_times(pool, tmp_path_factory.mktemp("jobs") / "slow", SLOW, *SAVED)


@pytest.fixture(scope="module")
def baseline(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_with_times(pool, tmp_path_factory.mktemp("jobs") / "baseline", AS_PREDICTED, *BASELINE)


def stopped_at(run: Job, step: int, folder: Path) -> Path:
    """The folder as the run would have left it if it had been killed after the checkpoint of a step."""
    shutil.copytree(run.folder, folder)
    for path in (folder / FOLDER).iterdir():
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)
    return folder


def kinds(job: Job) -> list[tuple[int, int, int]]:
    """Returns the first step, stages and replicas of each plan."""
    return [(plan["step"], len(plan["stages"]), plan["num_replicas"]) for plan in job.summary["plans"]]


def test_a_plan_that_is_slower_than_predicted_gives_way_and_the_losses_stay(slow: Job, on_one_device: Job) -> None:
    (first, second, *_) = kinds(slow)
    assert first == (0, 1, 2)
    assert second[0] == 8, "two steps of warm-up and six that count"
    assert second[1:] != (1, 2)
    timed = slow.events("plan_timed")
    assert (timed[0]["step"], timed[0]["measured_step_s"]) == (8, 1e4)
    assert timed[0]["predicted_step_s"] < 100
    assert slow.events("transition")[0]["reason"] == "its first steps have shown that another plan is faster"
    assert slow.losses == pytest.approx(on_one_device.losses, rel=0, abs=1e-10)


def test_plans_do_not_alternate(pool: Pool, tmp_path: Path) -> None:
    """All are far slower than predicted, and each is tried once; then the run stays where it was fastest."""
    job = run_with_times(pool, tmp_path / "run", {"data": 3e4, "single": 4e4, "pipeline": 2e4, "hybrid": 5e4})
    plans = kinds(job)
    assert len({plan[1:] for plan in plans[:3]}) == 3
    assert plans[-1][1:] == (2, 1)
    assert len(plans) <= 4


def test_a_target_in_seconds_is_spent_by_the_seconds_that_steps_have_shown(pool: Pool, tmp_path: Path) -> None:
    target = ("parallel=data", "freeze=schedule", "freeze.num_frozen=[2]", "freeze.interval=0.5", TARGET)
    job = run_with_times(pool, tmp_path / "run", AS_PREDICTED | {"data": 120.0}, *target)
    (decision, *_), (timed, *_) = job.events("decision"), job.events("plan_timed")
    assert (timed["step"], timed["predicted_step_s"]) == (8, pytest.approx(88.0, rel=1e-3))
    told = re.search(r"as ([\d.e+]+) of", decision["reason"])
    assert told is not None, decision["reason"]
    assert float(told[1]) == pytest.approx(8 * 88.0 + (decision["step"] - 8) * 120.0, rel=0.01)


@pytest.mark.thorough  # every run asks the planner: test_what_is_fixed_holds_for_every_plan
def test_a_fixed_arrangement_stays_however_slow_it_is(pool: Pool, tmp_path: Path) -> None:
    job = run_with_times(pool, tmp_path / "run", SLOW, "parallel=data")
    assert kinds(job) == [(0, 1, 2)]


def test_a_small_difference_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    steady = run_with_times(pool, tmp_path / "steady", AS_PREDICTED)
    (timed,) = steady.events("plan_timed")
    slower = timed["predicted_step_s"] * 1.02
    job = run_with_times(pool, tmp_path / "run", AS_PREDICTED | {"data": slower})
    assert kinds(job) == kinds(steady) == [(0, 1, 2)]


def test_a_baseline_times_each_kind_by_steps_of_the_training(baseline: Job, on_one_device: Job) -> None:
    plans = kinds(baseline)
    assert [step for step, *_ in plans] == [0, 8, 16, 24]
    assert {plan[1:] for plan in plans[:3]} == {(1, 1), (1, 2), (2, 1)}
    assert plans[3][1:] == (1, 2), "the fastest goes on"
    assert baseline.losses == pytest.approx(on_one_device.losses, rel=0, abs=1e-10)
    summary, seconds = baseline.summary, [step["step_seconds"] for step in baseline.events("step")]
    assert summary["speedup_is"] == "measured"
    assert not [message for message in baseline.messages if message.startswith("baseline=")]
    timed = {(len(plan["stages"]), plan["num_replicas"]): plan for plan in summary["static_plans"]}
    assert timed[1, 1]["num_steps"] == timed[2, 1]["num_steps"] == 6
    first = plans[0][1:]
    own = seconds[2:8] + (seconds[26:] if first == (1, 2) else [])
    assert timed[first]["median_step_s"] == pytest.approx(median(own))
    fastest = min(plan["median_step_s"] for plan in timed.values())
    assert summary["speedup_vs_static"] == pytest.approx(fastest * 48 / summary["train_seconds"])


@pytest.mark.thorough  # every run goes back to the fastest: test_a_baseline_times_each_kind_by_steps_of_the_training
def test_a_baseline_goes_back_to_the_arrangement_that_was_asked_for(pool: Pool, tmp_path: Path) -> None:
    job = run_with_times(pool, tmp_path / "run", SLOW, "baseline=true", "parallel=data")
    assert kinds(job)[-1][1:] == (1, 2)
    assert len(job.summary["static_plans"]) == 3


def test_a_baseline_goes_on_where_a_run_was_stopped_in_it(pool: Pool, tmp_path: Path, baseline: Job) -> None:
    job = Job(stopped_at(baseline, 10, tmp_path / "run"), "")  # under the second kind
    options = (*RUN, *BASELINE, "resume.run=auto")
    assert set(pool.run(2, play_with_step_times, options, job.folder, AS_PREDICTED)) == {""}
    assert len(job.events("resume")) == 1
    timed = {(len(plan["stages"]), plan["num_replicas"]) for plan in job.summary["static_plans"]}
    assert timed == {(1, 1), (1, 2), (2, 1)}
    assert job.summary["speedup_is"] == "measured"
    begun = [event["message"] for event in job.events("phase")]
    assert begun.count("reading data") == 2, "what the second start says stays in the log"


def test_a_run_that_goes_on_knows_how_long_steps_took_before(pool: Pool, tmp_path: Path, slow: Job) -> None:
    """Otherwise it would try the slow plan again, and compare itself with a static plan that it takes for fast."""
    job = Job(stopped_at(slow, 20, tmp_path / "run"), "")
    assert set(pool.run(2, play_with_step_times, (*RUN, *SAVED, "resume.run=auto"), job.folder, SLOW)) == {""}
    assert len(job.events("resume")) == 1
    went_on = [plan for step, *plan in kinds(job) if step >= 20]
    assert went_on == [[*kinds(slow)[-1][1:]]], "not the one that was predicted to be the fastest"
    static_s = min(SLOW["single"], SLOW["pipeline"])
    assert job.summary["speedup_vs_static"] == pytest.approx(static_s * 48 / job.summary["train_seconds"], rel=0.01)


def test_without_a_baseline_the_comparison_is_said_to_be_predicted(on_one_device: Job) -> None:
    assert on_one_device.summary["speedup_is"] == "predicted"
    assert on_one_device.summary["baseline"] is False


def test_a_freeze_ends_the_trial_of_static_plans(pool: Pool, tmp_path: Path) -> None:
    frozen = ("freeze=schedule", "freeze.num_frozen=[1]", "freeze.interval=0.25")
    job = run_with_times(pool, tmp_path / "run", AS_PREDICTED, "baseline=true", *frozen)
    assert [plan["num_frozen"] for plan in job.summary["plans"]][-1] == 1
    assert len(job.summary["static_plans"]) == 1, "the second kind had made four steps by then"
    assert job.summary["speedup_is"] == "predicted", "two kinds were not timed"
    assert job.summary["baseline"] is True
    (told,) = [message for message in job.messages if message.startswith("baseline=true takes 24 steps for 3 static")]
    assert "the next decision, or the end, is 12 steps away; give a larger freeze.interval=" in told

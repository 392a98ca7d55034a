"""Evaluation every so many steps, an early end by a metric, and the best weights: the same in any world."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.guarding import Scores, train_guarded
from support.jobs import TINY, Job, loaded, run_job
from support.pool import Pool
from support.saved import exported
from support.scores import play_with_scores

import pipetransformer as pt
from pipetransformer.checkpoint.folder import FOLDER
from pipetransformer.config.schema import write_config
from pipetransformer.report.summary_text import summary_rows

# the first evaluation is the best, and no later one gains so much
STOPS = pt.Evaluation(every_epochs=None, every_steps=2, metric="loss", patience=2, min_delta=1e9)
SAVES = pt.Checkpointing(every_steps=1, keep=2)
RUN = (*TINY, "precision=float64", "epochs=3", "freeze=schedule", "freeze.num_frozen=[1]", "freeze.interval=0.5")
BEST = (*RUN, "evaluate.save=best", "evaluate.every_steps=2", "checkpoint.keep=1", "checkpoint.keep_best=0")
SCORES = [0.5, 0.6, 0.9, 0.7, 0.6, 0.8]  # at steps 2, 4, ... 12


@pytest.mark.thinned("[2]")
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_ends_early_on_all_ranks_with_the_rates_of_the_whole_run(pool: Pool, tmp_path: Path, world: int) -> None:
    whole = pool.run(1, train_guarded, tmp_path / "whole", pt.Parallel(), {}, {})[0]
    for seen in pool.run(world, train_guarded, tmp_path / "run", pt.Parallel(), {}, {"evaluate": STOPS}):
        assert seen.losses == pytest.approx(whole.losses[:6], rel=0, abs=1e-10)
        assert seen.summary["optimizer_steps"] == 6
        early = seen.summary["stopped_early"]
        assert early["step"] == 6
        assert early["reason"].startswith("no lower loss than ")
        assert early["reason"].endswith(" by more than 1e+09 for 2 evaluations")
        assert seen.summary["metric"]["name"] == "loss"
        assert seen.summary["speedup_vs_static"] > 0
    assert (tmp_path / "run" / FOLDER / "step-00000006").is_dir()


def test_a_resumed_run_has_waited_as_long_as_before(pool: Pool, tmp_path: Path) -> None:
    options = {"evaluate": STOPS, "checkpoint": SAVES}
    expected = pool.run(1, train_guarded, tmp_path / "whole", pt.Parallel(), {}, options)[0]
    pool.run(2, train_guarded, tmp_path / "run", pt.Parallel(), {}, options, None, 5)
    for seen in pool.run(3, train_guarded, tmp_path / "run", pt.Parallel(), {}, options | {"resume": True}):
        assert seen.steps == [1, 2, 3, 4, 5, 6]
        assert seen.losses == pytest.approx(expected.losses[-len(seen.losses) :], rel=0, abs=1e-10)
        assert seen.summary["stopped_early"] == expected.summary["stopped_early"]
    for seen in pool.run(1, train_guarded, tmp_path / "run", pt.Parallel(), {}, options | {"resume": True}):
        assert seen.losses == [], "it has ended"


def test_a_run_that_goes_on_by_another_metric_has_no_best_value_and_has_not_waited(pool: Pool, tmp_path: Path) -> None:
    options = {"evaluate": pt.Evaluation(metric="constant", save="best"), "metrics": Scores()}
    pool.run(1, train_guarded, tmp_path, pt.Parallel(), {}, options, None, 10)
    other = pt.Evaluation(metric="rising", save="best", patience=1)
    allowed = {"resume": True, "resume_allow": ["evaluate.metric", "evaluate.patience"]}
    options = {"evaluate": other, "metrics": Scores(("rising", "step")), **allowed}
    (seen,) = pool.run(1, train_guarded, tmp_path, pt.Parallel(), {}, options)
    assert seen.error == ""
    assert seen.summary["best"] == {"name": "rising", "value": 0.2, "split": "dev", "step": 20}
    assert "stopped_early" not in seen.summary
    assert seen.summary["metric"]["step"] == 20, "and not the metric of this name"


def test_the_best_value_stays_where_the_metric_is_asked_for_by_its_name(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, train_guarded, tmp_path, pt.Parallel(), {}, {"metrics": Scores()}, None, 10)
    allowed = {"resume": True, "resume_allow": ["evaluate.metric"]}
    options = {"evaluate": pt.Evaluation(metric="constant"), "metrics": Scores(), **allowed}
    (seen,) = pool.run(1, train_guarded, tmp_path, pt.Parallel(), {}, options)
    assert seen.error == ""
    assert seen.summary["best"]["step"] == 5


def test_a_run_that_comes_to_its_end_has_not_stopped_early(pool: Pool, tmp_path: Path) -> None:
    scores = [0.5, 0.6, 0.6]  # at the ends of three epochs
    assert pool.run(1, play_with_scores, scores, (*RUN, "evaluate.patience=1"), tmp_path) == [""]
    job = Job(tmp_path, "")
    assert job.summary["optimizer_steps"] == 12
    assert "stopped_early" not in job.summary


def test_evaluations_between_the_ends_of_epochs_change_nothing(pool: Pool, tmp_path: Path) -> None:
    whole = run_job(pool, 2, tmp_path / "whole", *RUN, made_up_times=True)
    often = run_job(pool, 2, tmp_path / "often", *RUN, "evaluate.every_steps=3", made_up_times=True)
    assert often.losses == pytest.approx(whole.losses, rel=0, abs=1e-12)
    assert [event["step"] for event in often.events("evaluate")] == [3, 4, 6, 8, 9, 12]
    assert often.summary["cache"]["hit_rate"] == 1
    steps = run_job(
        pool, 1, tmp_path / "steps", *RUN, "evaluate.every_epochs=null", "evaluate.every_steps=5", made_up_times=True
    )
    assert [event["step"] for event in steps.events("evaluate")] == [5, 10, 12]


def test_the_best_weights_are_saved_and_their_checkpoint_stays(pool: Pool, tmp_path: Path) -> None:
    write_config(loaded(*BEST), tmp_path)
    assert pool.run(2, play_with_scores, SCORES, BEST, tmp_path) == ["", ""]
    job = Job(tmp_path, "")
    scores = {"test": {"accuracy": 0.9}}
    assert job.summary["model"] == {"folder": str(tmp_path / "model"), "step": 6, "metrics": scores}
    assert (job.summary["metrics"], job.summary["last_step"]) == ({"test": {"accuracy": 0.8}}, 12)
    assert job.summary["metric"]["step"] == 12
    told = dict(summary_rows(job.summary))
    assert told["saved"] == "the weights of step 6: test/accuracy 0.9"
    assert told["accuracy"].startswith("0.8 on test, ")
    assert told["accuracy"].endswith(", with the weights of step 12, which are not the saved ones")
    assert (job.summary["best"]["value"], job.summary["best"]["step"]) == (0.9, 6)
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {"step-00000006", "step-00000012"}
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for step, is_same in ((None, True), (12, False)):
        pool.run(1, exported, tmp_path, step, tmp_path / f"out-{step}")
        other = load_file(tmp_path / f"out-{step}" / "model.safetensors")
        assert all(torch.equal(tensor, other[name]) for name, tensor in saved.items()) == is_same
    assert "accuracy 0.9000 at step 6" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.thinned("layer")
@pytest.mark.parametrize("file", ["layer-002.safetensors", "manifest.json"])
def test_the_last_weights_are_saved_where_the_best_checkpoint_is_damaged(pool: Pool, tmp_path: Path, file: str) -> None:
    damaged = f"{FOLDER}/step-00000006/{file}"
    assert pool.run(2, play_with_scores, SCORES, BEST, tmp_path, damaged) == ["", ""]
    job = Job(tmp_path, "")
    (message,) = job.messages
    assert message.startswith("the best checkpoint, of step 6, cannot be read (")
    assert damaged in message
    assert message.endswith("; the last weights are saved")
    assert job.summary["model"]["step"] == 12


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluate.metric=f2"], "evaluate.metric=f2: test is not scored by f2; choose of accuracy"),
        (["evaluate.metric=dev/f1"], "evaluate.metric=dev/f1: there is no split dev; choose of test"),
        (["evaluate.patience=0"], "evaluate.patience=0 is below 1"),
        (["evaluate.save=worst"], "evaluate.save=worst is unknown; choose one of last, best"),
        (["evaluate.save=best", "checkpoint=off"], "evaluate.save=best takes the weights from a checkpoint"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    pool: Pool, tmp_path: Path, overrides: list[str], message: str
) -> None:
    job = run_job(pool, 1, tmp_path / "run", *TINY, *overrides)
    assert message in job.error
    assert not job.losses

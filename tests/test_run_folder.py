"""One run from the command line, and all that it leaves behind."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from support.command import Ended, command, train
from support.jobs import TINY, Job, loaded, run_job
from support.pool import Pool
from support.saved import evaluated, predicted_by_command
from support.texts import SENTENCES, text_run, write_encoder, write_table

from pipetransformer.saved import OF_LABELLED, OF_MODELS, OF_SAMPLES, Options, _export, without_effect

RUN = (*TINY, "dataset.max_train_samples=256", "epochs=6", "freeze.interval=0.5", "optim.lr=0.005")
NUM_STEPS = 6 * 16
SUMMARY = {
    "status", "metric", "train_seconds", "optimizer_steps", "samples_per_second", "num_blocks", "num_frozen",
    "mean_frozen_fraction", "speedup_vs_static", "limit", "share_of_limit", "plans", "best", "is_static",
    "time_parts",
}  # fmt: skip
PLAN = {
    "step", "num_frozen", "cache_level", "stages", "num_replicas", "num_microbatches", "schedule",
    "transition_seconds", "reason", "step_parts",
}  # fmt: skip


def saved(folder: Path, name: str, *arguments: str) -> Ended:
    """Runs ``pipetransformer-<name>`` in a folder."""
    return command(folder, sys.executable, "-c", f"from pipetransformer.saved import {name}; {name}()", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def ended(folder: Path, passing: Path) -> Ended:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(passing))
        return train(folder, *RUN, "hydra.run.dir=run", "parallel.world_size=2")


@pytest.fixture(scope="module")
def job(folder: Path, ended: Ended) -> Job:
    assert ended.code == 0, ended.err
    return Job(folder / "run", error="")


def test_the_folder_holds_settings_environment_events_summary_and_model(job: Job) -> None:
    names = {path.name for path in job.folder.iterdir()}
    assert {"config.yaml", "env.json", "metrics.jsonl", "summary.json", "model"} <= names
    assert "cache" not in names


def test_everyone_who_may_read_the_summary_may_read_the_model(job: Job) -> None:
    mode = (job.folder / "summary.json").stat().st_mode
    assert {file.stat().st_mode for file in (job.folder / "model").iterdir()} == {mode}


def test_nothing_is_left_elsewhere(folder: Path, passing: Path, job: Job) -> None:
    assert [path.name for path in folder.iterdir()] == [job.folder.name]
    assert not list(passing.iterdir())


def test_the_settings_are_resolved_and_compose_the_same_run(job: Job) -> None:
    settings = yaml.safe_load((job.folder / "config.yaml").read_text())
    assert (settings["epochs"], settings["optim"]["lr"], settings["parallel"]["world_size"]) == (6, 0.005, 2)
    assert "${" not in (job.folder / "config.yaml").read_text()


def test_the_environment_names_the_versions(job: Job) -> None:
    environment = json.loads((job.folder / "env.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__.partition("+")[0]


def test_the_summary_is_complete(job: Job) -> None:
    summary = job.summary
    assert summary.keys() >= SUMMARY
    assert summary["status"] == "completed"
    assert summary["optimizer_steps"] == len(job.losses) == NUM_STEPS
    assert (summary["num_frozen"], summary["num_blocks"]) == (1, 2)
    assert all(plan.keys() >= PLAN for plan in summary["plans"])
    frozen = [plan["num_frozen"] for plan in summary["plans"]]  # the first steps of a plan may lead to another one
    assert (list(dict.fromkeys(frozen)), frozen) == ([0, 1], sorted(frozen))
    assert all(summary[name] > 0 for name in ("speedup_vs_static", "limit", "share_of_limit"))


def test_the_saved_model_has_the_accuracy_of_the_run_in_timm(job: Job) -> None:
    import timm

    from pipetransformer.data.base import ImageFormat

    config = loaded(*TINY)
    test = config.dataset.load(ImageFormat(**config.model.input_format())).evaluation[0]
    model = timm.create_model(f"local-dir:{job.folder / 'model'}", pretrained=True).eval()
    assert json.loads((job.folder / "model" / "config.json").read_text())["label_names"] == [*"0123456789"]
    ids = list(range(len(test)))
    with torch.no_grad():
        predicted = model(test.inputs(ids, None)).argmax(1)
    metric = job.summary["metric"]
    assert (metric["name"], metric["split"], metric["num_samples"]) == ("accuracy", "test", len(test))
    assert metric["value"] == pytest.approx(float(np.mean(predicted.numpy() == test.targets(ids).numpy())))
    assert metric["value"] > 0.3, "it has learnt something, so that other weights would show"


def test_the_saved_model_has_the_accuracy_of_the_run_in_transformers(pool: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    encoder, labels = write_encoder(tmp_path), [0, 1, 0, 1]  # of singing and of sleeping birds
    write_table(tmp_path / "train.tsv", labels * 4)
    write_table(tmp_path / "dev.tsv", labels)
    training = ["epochs=8", "optim.lr=0.01", "freeze=schedule", "freeze.num_frozen=[0,0,0,2]"]
    job = run_job(pool, 2, tmp_path / "run", *text_run(encoder, "sst2", tmp_path), *training)
    folder = tmp_path / "run" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.id2label == {0: "negative", 1: "positive"}
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**tokens).logits.argmax(1)
    assert job.summary["metric"]["value"] == (predicted == torch.tensor(labels)).double().mean()
    assert job.summary["metric"]["value"] == 1, "it has learnt all, so that other weights would show"
    assert job.summary["num_frozen"] == 2


def test_what_is_printed_tells_the_run(ended: Ended) -> None:
    assert "accuracy" in ended.out
    assert f"transition at step {NUM_STEPS // 2}" in ended.out
    assert "model: run/model  (timm.create_model('local-dir:run/model', pretrained=True))" in ended.out
    assert "Traceback" not in ended.err


def test_the_card_gives_the_command(job: Job) -> None:
    card = (job.folder / "model/README.md").read_text()
    assert "pipetransformer-train logger=none" in card
    assert "optim.lr=0.005" in card


def test_pictures_are_predicted_by_a_command(pool: Pool, folder: Path, job: Job, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "black.png")
    unread = "optim.lr=0.5", "dataset.max_eval_samples=3"
    words = (f"run={job.folder}", f"input={tmp_path}", f"output={tmp_path / 'out.csv'}", "batch_size=2", *unread)
    ((out, err),) = pool.run(1, predicted_by_command, words)
    assert f"warning: {', '.join(unread)} have no effect on pipetransformer-predict; drop them\n" in err
    assert out == f"1 prediction by the model of step {NUM_STEPS}: {tmp_path / 'out.csv'}\n"
    assert (tmp_path / "out.csv").read_text().startswith("file,prediction,scores_0,scores_1,")
    without_torch = "import sys; sys.modules['torch'] = None; from pipetransformer.saved import predict; predict()"
    ended = command(folder, sys.executable, "-c", without_torch, *words)
    assert (ended.code, len(ended.err.splitlines())) == (1, 1), ended.err
    assert "out.csv is there already" in ended.err


def test_the_run_is_scored_by_a_command(pool: Pool, job: Job, tmp_path: Path) -> None:
    arguments = [f"run={job.folder}", "split=test,train", "predictions=true", f"out={tmp_path / 'scores'}"]
    (out,) = pool.run(1, evaluated, arguments)
    accuracy = job.summary["metrics"]["test"]["accuracy"]
    step = job.summary["optimizer_steps"]
    assert out.splitlines()[0] == f"test: accuracy {accuracy:.6g} (40 samples), the model of step {step}"
    assert {path.name for path in (tmp_path / "scores").iterdir()} == {"metrics.json", "test.jsonl", "train.jsonl"}


def test_a_command_prints_the_score_of_a_saved_run_and_nothing_else(folder: Path, job: Job, tmp_path: Path) -> None:
    """Libraries that count their objects at the end of a process would complain of those that the run has left."""
    ended = saved(folder, "evaluate", "run=run", f"out={tmp_path / 'own'}")
    assert (ended.code, ended.err) == (0, "")
    score, place = ended.out.splitlines()
    assert score.startswith(f"test: accuracy {job.summary['metrics']['test']['accuracy']:.6g} (40 samples)")
    assert str(tmp_path / "own") in place


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give the folder of a run by run=<folder>"),
        (["outputs/x"], "write options as run=<value>, not outputs/x; --help lists them"),
        (["run=nowhere"], "run=nowhere is no run folder: it has no config.yaml; give the folder of one run"),
        (["run=run", "stp=5"], "stp does not exist; did you mean step?"),
    ],
)
def test_a_command_for_a_saved_run_explains_a_wrong_option_in_a_line(
    folder: Path, job: Job, arguments: list[str], words: str
) -> None:
    ended = saved(folder, "export", *arguments)
    assert ended.code == 1
    assert words in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "known", "beside", "unread"),
    [
        (["optim.lr=1", "precision=bfloat16", "batch_size=2"], OF_MODELS, (), ["optim.lr=1", "batch_size=2"]),
        (["batch_size=2", "dataset.path=x", "parallel.device=cpu"], OF_SAMPLES, (), []),
        (["dataset.path=x", "++dataset.max_length=8"], OF_SAMPLES, OF_LABELLED, ["dataset.path=x"]),
        (["dataset.hub_name=x"], OF_SAMPLES, OF_LABELLED, ["dataset.hub_name=x"]),
        (["parallel.world_size=2", "+optim.lr=1"], OF_SAMPLES, (), ["parallel.world_size=2", "+optim.lr=1"]),
    ],
)
def test_options_of_a_run_that_a_command_does_not_read_are_known(
    given: list[str], known: tuple[str, ...], beside: tuple[str, ...], unread: list[str]
) -> None:
    assert without_effect(given, known, beside) == unread


def test_adapters_that_a_run_does_not_have_are_not_merged_in_silence(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("open_model", "export"):
        monkeypatch.setattr(f"pipetransformer.training.saved_run.{name}", lambda *_: SimpleNamespace(step=1))
    _export(Options(run=str(job.folder), merge="true"))
    assert "warning: merge=true has no effect on pipetransformer-export; drop it\n" in capsys.readouterr().err


def test_the_commands_for_saved_runs_have_help(tmp_path: Path) -> None:
    for name in ("export", "evaluate"):
        ended = saved(tmp_path, name, "--help")
        assert ended.code == 0
        assert f"  pipetransformer-{name} run=<folder>" in ended.out

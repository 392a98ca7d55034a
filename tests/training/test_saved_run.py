"""A run's model, exported and scored after the run."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from support.jobs import TINY, Job, loaded, run_job
from support.pool import Pool
from support.saved import config_format, evaluated, exported, scored
from support.texts import text_run, write_encoder, write_squad, write_table

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.checkpoint.manifest import layer_file
from pipetransformer.config.compose import read_config
from pipetransformer.config.schema import CONFIG, write_config
from pipetransformer.errors import UserError
from pipetransformer.report.card import CARD, write_card
from pipetransformer.report.environment import write_overrides
from pipetransformer.report.event_log import EVENT_LOG
from pipetransformer.saved import evaluate, settings_to_score
from pipetransformer.training.saved_run import export, open_saved
from pipetransformer.training.saved_scores import splits

RUN = (*TINY, "freeze=schedule", "freeze.num_frozen=[1]", "freeze.interval=0.5", "checkpoint.every_steps=2",
       "checkpoint.keep=9", "epochs=3")  # fmt: skip


def recorded(pool: Pool, folder: Path, world: int, *overrides: str) -> Job:
    """A run with the record of its settings that the command writes."""
    job = run_job(pool, world, folder, *overrides, made_up_times=True)
    assert job.error == ""
    write_config(loaded(*overrides), folder)
    return job


@pytest.fixture(scope="module")
def job(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return recorded(pool, tmp_path_factory.mktemp("saved") / "run", 2, *RUN)


def test_the_newest_checkpoint_is_exported_as_the_run_saved_it(pool: Pool, job: Job, tmp_path: Path) -> None:
    assert pool.run(1, exported, job.folder, None, tmp_path / "out") == [12]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", job.folder / "model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True) is not None


def test_an_earlier_checkpoint_is_exported_and_scored_as_it_was(pool: Pool, job: Job, tmp_path: Path) -> None:
    assert pool.run(1, exported, job.folder, 4, tmp_path / "out") == [4]
    last = load_file(job.folder / "model" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert any(not torch.equal(tensor, last[name]) for name, tensor in found.items())
    (results,) = pool.run(1, scored, job.folder, 4, [], tmp_path / "scores", False)
    (then,) = (event for event in job.events("evaluate") if event["step"] == 4)
    assert results["test"] == {**then["metrics"], "num_samples": 40}


def test_scores_are_those_of_the_run_and_predictions_give_them(pool: Pool, job: Job, tmp_path: Path) -> None:
    (results,) = pool.run(1, scored, job.folder, None, ["test", "train"], tmp_path, True)
    assert results["test"] == {**job.summary["metrics"]["test"], "num_samples": 40}
    for split, count in (("test", 40), ("train", 64)):
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        assert [row["id"] for row in rows] == list(range(count))
        assert np.mean([row["prediction"] == row["target"] for row in rows]) == results[split]["accuracy"]
        assert all(row[f"{each}_label"] == str(row[each]) for row in rows for each in ("prediction", "target"))
        assert not any("label" in row for row in rows), "which is the truth elsewhere"
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written == {"step": 12, "dataset": "digits", "splits": results}
    (tmp_path / "notes.jsonl").touch()
    pool.run(1, scored, job.folder, 4, ["test"], tmp_path, False)
    assert json.loads((tmp_path / "metrics.json").read_text())["step"] == 4
    left = sorted(file.name for file in tmp_path.iterdir())
    assert left == ["metrics.json", "notes.jsonl"], "no predictions of another step, and what is not its own"


def test_an_older_checkpoint_stands_in_for_that_of_the_end_where_it_is_damaged_and_the_model_is_gone(
    pool: Pool, job: Job, tmp_path: Path
) -> None:
    run = shutil.copytree(job.folder, tmp_path / "run")
    shutil.rmtree(run / "model")
    newest = CheckpointFolder(run / FOLDER).published()[-1]
    with (newest / layer_file(1)).open("r+b") as file:
        file.truncate(100)
    assert pool.run(1, exported, run, None, tmp_path / "out") == [10]


def test_a_run_without_checkpoints_is_scored_by_its_saved_model(pool: Pool, tmp_path: Path) -> None:
    job = recorded(pool, tmp_path / "run", 1, *RUN, "checkpoint=off")
    (results,) = pool.run(1, scored, job.folder, None, [], tmp_path / "scores", False)
    assert results["test"] == {**job.summary["metrics"]["test"], "num_samples": 40}


def test_texts_are_scored_on_other_data(pool: Pool, tmp_path: Path) -> None:
    for folder, labels in (("here", [0, 1] * 8), ("there", [1, 1, 0] * 4)):
        (tmp_path / folder).mkdir()
        for name in ("train", "dev"):
            write_table(tmp_path / folder / f"{name}.tsv", labels)
    options = text_run(write_encoder(tmp_path / "encoder"), "sst2", tmp_path / "here")
    job = recorded(pool, tmp_path / "run", 1, *options, "epochs=1", "freeze=none")
    other = [f"dataset.path={tmp_path / 'there'}"]
    (results,) = pool.run(1, scored, job.folder, None, [], tmp_path / "scores", True, other)
    rows = [json.loads(line) for line in (tmp_path / "scores/dev.jsonl").read_text().splitlines()]
    assert [row["target"] for row in rows] == [1, 1, 0] * 4
    assert results["dev"]["num_samples"] == 12
    assert np.mean([row["prediction"] == row["target"] for row in rows]) == results["dev"]["accuracy"]


@pytest.mark.thorough  # every run is told the remedy: test_the_remedy_for_other_classes_names_them_all_...
def test_data_with_other_classes_is_refused(pool: Pool, tmp_path: Path) -> None:
    for folder, other in (("here", "good"), ("there", "worse")):
        rows = [f"a bird sings,{label}" for label in ("bad", other) * 8]
        (tmp_path / f"{folder}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    options = text_run(write_encoder(tmp_path / "encoder"), "text", tmp_path / "here.csv")
    job = recorded(pool, tmp_path / "run", 1, *options, "epochs=1", "freeze=none", "dataset.eval_fraction=0.5")
    there = read_config(job.folder / CONFIG, [f"dataset.path={tmp_path / 'there.csv'}"])
    with pytest.raises(UserError, match=r"has learned the classes bad, good, and this data has bad, worse; .*labels="):
        open_saved(job.folder, there)


def test_pictures_of_another_size_are_scored_in_that_of_the_run_or_refused(job: Job) -> None:
    larger = read_config(job.folder / CONFIG, ["model.image_size=16"])
    with pytest.raises(UserError, match=r"shape \(1, 16, 16\).*trained on \(1, 8, 8\); .*model\.image_size=8"):
        open_saved(job.folder, larger)
    resized = read_config(job.folder / CONFIG, ["model.image_size=8"])
    assert open_saved(job.folder, resized).data.input_shape == (1, 8, 8)


def test_the_remedy_for_other_classes_names_them_all_as_hydra_reads_them(pool: Pool, tmp_path: Path) -> None:
    names = ["no", "yes", "it: is", "01", *"abcdefgh"]
    for name, labels in (("here", names), ("there", names[1:])):
        rows = [f"a bird sings,{label}" for label in labels * 2]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    options = text_run(write_encoder(tmp_path / "encoder"), "text", tmp_path / "here.csv")
    job = recorded(pool, tmp_path / "run", 1, *options, "epochs=1", "freeze=none")
    other = f"dataset.path={tmp_path / 'there.csv'}"
    with pytest.raises(UserError) as refused:
        open_saved(job.folder, read_config(job.folder / CONFIG, [other]))
    remedy = str(refused.value).partition('as "')[2].rstrip('"')
    found = open_saved(job.folder, read_config(job.folder / CONFIG, [other, remedy])).data
    assert [*found.task.head.labels] == sorted(names)


def test_all_of_a_file_of_other_data_is_scored(pool: Pool, tmp_path: Path) -> None:
    for name, num in (("train", 8), ("dev", 3), ("test", 5)):
        rows = [f"a bird sings,{label}" for label in ("bad", "good") * num]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    options = text_run(write_encoder(tmp_path / "encoder"), "text", tmp_path / "train.csv")
    other = f"dataset.path={tmp_path / 'test.csv'}"
    for number, own in enumerate([[], [f"dataset.eval_path={tmp_path / 'dev.csv'}"]]):
        job = recorded(pool, tmp_path / f"run{number}", 1, *options, *own, "epochs=1", "freeze=none")
        for overrides, name, count in (
            ([], "dev" if own else "held_out", 6 if own else 2),
            ([other], "test", 10),
            ([other, "dataset.eval_path=null"], "held_out", 1),
            ([f"dataset.path={tmp_path / 'train.csv'}"], "dev" if own else "held_out", 6 if own else 2),
        ):
            config, _ = settings_to_score(job.folder / CONFIG, overrides)
            (split,) = open_saved(job.folder, config).data.evaluation
            assert (split.name, len(split)) == (name, count)


def test_no_limit_and_no_split_of_the_run_holds_for_other_data(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    for name, num in (("train", 8), ("dev", 3), ("other", 5), ("new/train", 4), ("new/test", 6)):
        rows = [f"a bird sings,{label}" for label in ("bad", "good") * num]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    options = text_run(write_encoder(tmp_path / "encoder"), "text", tmp_path / "train.csv")
    own = (f"dataset.eval_path={tmp_path / 'dev.csv'}", "dataset.max_eval_samples=2", "dataset.max_train_samples=4")
    write_config(loaded(*options, *own), tmp_path)
    for overrides, name, count in (
        ([], "dev", 2),
        ([f"dataset.path={tmp_path / 'other.csv'}"], "other", 10),
        ([f"dataset.path={tmp_path / 'other.csv'}", "dataset.max_eval_samples=3"], "other", 3),
        ([f"dataset.path={tmp_path / 'new'}"], "test", 12),
        ([f"dataset.eval_path={tmp_path / 'other.csv'}"], "other", 10),
    ):
        config, _ = settings_to_score(tmp_path / CONFIG, overrides)
        (split,) = config.dataset.load(config_format(config)).evaluation
        assert (split.name, len(split)) == (name, count)


def test_weights_of_classes_need_not_be_found_in_other_data(tmp_path: Path) -> None:
    for name, labels in (("train", "abc"), ("other", "ab")):
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *(f"bird,{each}" for each in labels * 4)]))
    options = text_run(write_encoder(tmp_path / "encoder"), "text", tmp_path / "train.csv")
    write_config(loaded(*options, "dataset.class_weights=balanced"), tmp_path)
    other = [f"dataset.path={tmp_path / 'other.csv'}", "dataset.labels=[a,b,c]"]
    config, _ = settings_to_score(tmp_path / CONFIG, other)
    assert len(config.dataset.load(config_format(config)).evaluation[0]) == 8


def test_the_data_of_the_run_elsewhere_is_scored_as_in_the_run(pool: Pool, tmp_path: Path) -> None:
    """Most of its rows were trained on."""
    for name, num in (("train", 8), ("other", 5)):
        rows = [f"a bird sings,{label}" for label in ("bad", "good") * num]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    options = text_run(write_encoder(tmp_path / "encoder"), "text", tmp_path / "train.csv")
    job = recorded(pool, tmp_path / "run", 1, *options, "epochs=1", "freeze=none")
    moved = (tmp_path / "train.csv").rename(tmp_path / "moved.csv")
    (told,) = pool.run(1, evaluated, [f"run={job.folder}", f"dataset.path={moved}", f"out={tmp_path / 'own'}"])
    assert f"{moved} is the data of the run, whose own split is scored" in told
    assert "held_out: " in told
    (told,) = pool.run(1, evaluated, [f"run={job.folder}", f"dataset.path={tmp_path / 'other.csv'}"])
    assert "(10 samples)" in told


def test_other_data_of_which_a_part_would_be_scored_is_refused(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (write_squad(tmp_path / f"{name}.json", start=2) for name in ("here", "there"))
    there.write_text(json.dumps({"data": json.loads(here.read_text())["data"] * 2}))
    options = text_run(write_encoder(tmp_path / "encoder"), "squad", here)
    job = recorded(pool, tmp_path / "run", 1, *options, "dataset.stride=4", "dataset.max_length=12", "epochs=1")
    monkeypatch.setattr(sys, "argv", ["evaluate", f"run={job.folder}", f"dataset.path={there}"])
    with pytest.raises(
        SystemExit, match=r"there\.json has no split to evaluate on, .* split=train,held_out_articles for"
    ):
        evaluate()


@pytest.mark.parametrize(
    ("argument", "labels"),
    [
        ("dataset.labels=[no,yes]", ["no", "yes"]),
        ("dataset.labels=[01,02]", ["01", "02"]),
        ("dataset.labels=['on','1:30']", ["on", "1:30"]),
    ],
)
def test_options_are_read_as_on_the_command_line_of_the_run(argument: str, labels: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    options = text_run(write_encoder(tmp_path / "encoder"), "text", tmp_path / "a.csv")
    write_config(loaded(*options), tmp_path)
    found = read_config(tmp_path / CONFIG, [argument])
    assert vars(found.dataset)["labels"] == labels
    assert found == loaded(*options, argument)


def test_the_card_tells_data_scores_freezing_and_how_it_was_made(pool: Pool, job: Job, tmp_path: Path) -> None:
    pool.run(1, exported, job.folder, None, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    accuracy = job.summary["metrics"]["test"]["accuracy"]
    (reason,) = {event["reason"] for event in job.events("decision") if event["step"] == 6}
    for part in (
        "library_name: timm", "datasets: [digits]", f"| test, 40 samples | accuracy {accuracy:.4f} at step 12 |",
        "| data | digits max_train_samples=64 max_eval_samples=40 |", "| batch size, epochs, seed | 16, 3, 1 |",
        f"| 6 | 1 of 2 | {reason} |", "torch==", "Trained with blocks frozen from the bottom up;",
    ):  # fmt: skip
        assert part in card, card
    pool.run(1, exported, job.folder, 4, tmp_path / "early")
    early = (tmp_path / "early/README.md").read_text()
    assert "| step | 4 of 12 |" in early
    assert "| 6 | 1 of 2 |" not in early, "it was frozen later"
    assert "Trained with no block frozen;" in early
    assert "## Freezing" not in early


def test_a_block_that_froze_after_the_weights_were_saved_is_none_of_theirs(job: Job, tmp_path: Path) -> None:
    for step, words in ((6, "Trained with no block frozen;"), (7, "Trained with blocks frozen from the bottom up;")):
        write_card(job.folder, tmp_path, step)
        card = (tmp_path / CARD).read_text()
        assert words in card
        assert ("## Freezing" in card) == (step > 6)


def test_the_card_counts_the_steps_of_a_run_that_was_resumed_for_more_epochs(job: Job, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(job.folder, tmp_path / "run"))
    (start,) = job.events("start")
    with (folder / EVENT_LOG).open("a") as log:
        log.write(json.dumps(start | {"event": "resume", "step": 12, "epochs": 4, "num_steps": 16}) + "\n")
    write_overrides(
        folder, ["epochs=4", f"resume.run={folder}", "overwrite=true", f"hydra.run.dir={folder}", "freeze.a=1"]
    )
    write_card(folder, tmp_path, 16)
    card = (tmp_path / CARD).read_text()
    assert "| step | 16 of 16 |" in card
    assert "    pipetransformer-train epochs=4 freeze.a=1\n" in card, "others have not the folders of this machine"


def test_the_card_names_blocks_that_were_frozen_from_the_start(pool: Pool, tmp_path: Path) -> None:
    job = recorded(pool, tmp_path / "run", 1, *TINY, "freeze=prefix", "freeze.num_blocks=1", "epochs=1")
    pool.run(1, exported, job.folder, None, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "Trained with blocks frozen from the bottom up;" in card
    assert "| 0 | 1 of 2 | 1 of 2 blocks are frozen from the start |" in card


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda run, out: open_saved(run, read_config(run / CONFIG), step=5), "no whole checkpoint of step=5: it has"),
        (lambda run, out: splits(open_saved(run, read_config(run / CONFIG)).data, ["dev"]), "there is no split dev;"),
        (lambda run, out: export(open_saved(run, read_config(run / CONFIG)), run, run), "is not empty; give another"),
        (lambda run, out: read_config(run / CONFIG, ["dataset.pth=x"]), "did you mean dataset.path?"),
        (lambda run, out: open_saved(out, read_config(run / CONFIG)), "neither a whole checkpoint nor a saved model"),
        (lambda run, out: read_config(run / CONFIG, ["dataset=sst2"]), "dataset cannot be exchanged; give dataset.pa"),
        (lambda run, out: read_config(run / CONFIG, ["dataset="]), "dataset cannot be exchanged; give dataset.path=.."),
        (lambda run, out: read_config(run / CONFIG, ["cache=off"]), "a run's cache cannot be exchanged; give cache.en"),
        (lambda run, out: read_config(run / CONFIG, ["peft=lora"]), "a run's peft cannot be exchanged; leave it out"),
        (
            lambda run, out: read_config(run / CONFIG, ["seed=1,2"]),
            "seed=1,2 gives no single value; write seed=<value>",
        ),
        (
            lambda run, out: read_config(run / CONFIG, ["dataset.path=a(b"]),
            "dataset.path=a(b cannot be read; quote the",
        ),
        (lambda run, out: read_config(run / CONFIG, ["seed.x=1"]), "seed={'x': 1} must be a whole number"),
    ],
    ids=[
        "step",
        "split",
        "folder",
        "option",
        "empty",
        "group",
        "no group",
        "section",
        "none",
        "several",
        "quotes",
        "deep",
    ],
)
def test_what_is_not_there_is_refused(act: Callable[[Path, Path], Any], message: str, job: Job, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        act(job.folder, tmp_path)
    assert message in str(refused.value)

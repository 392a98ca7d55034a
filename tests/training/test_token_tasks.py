"""Whole runs of the tasks with a target for each token, from files to a saved model."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.jobs import Job, loaded, run_job
from support.pool import Pool
from support.saved import scored
from support.texts import SENTENCES, write_decoder, write_encoder

from pipetransformer.config.schema import write_config

TAGS = {"a": "O", "bird": "B-NOUN", "sings": "O", "sleeps": "B-VERB"}
OPTIONS = ("logger=none", "precision=float64", "epochs=4", "batch_size=5", "optim.lr=0.01", "model.pretrained=false")
FREEZING = ("freeze=schedule", "freeze.num_frozen=[0,1,2]")
PIPELINE = ("parallel.num_stages=2", "parallel.num_microbatches=2")


def sentences(num: int) -> list[str]:
    """Of one word to six."""
    return [" ".join((SENTENCES[row % 4] + " " + SENTENCES[row % 3]).split()[: 1 + row % 6]) for row in range(num)]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("tagged")
    for name, num in (("train", 23), ("dev", 13)):
        lines = ["".join(f"{word} {TAGS[word]}\n" for word in sentence.split()) for sentence in sentences(num)]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return ("model=bert", f"model.name={write_encoder(folder / 'model')}", "dataset=tokens", f"dataset.path={folder}")


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("prompted")
    for name, num in (("train", 23), ("dev", 13)):
        rows = [f"{sentence.partition(' ')[0]},{sentence.partition(' ')[2]}\n" for sentence in sentences(num)]
        (folder / f"{name}.csv").write_text("".join(["asked,said\n", *rows]))
    columns = ("dataset.prompt=asked", "dataset.completion=said", "dataset.separator=' '")
    model = ("model=gpt2", f"model.name={write_decoder(folder / 'model')}")
    return (*model, "dataset=causal_lm", f"dataset.path={folder}", *columns)


def alone_and_in_a_pipeline(pool: Pool, folder: Path, *overrides: str) -> tuple[Job, Job]:
    alone = run_job(pool, 1, folder / "alone", *overrides, *OPTIONS, *FREEZING, made_up_times=True)
    pipeline = run_job(pool, 2, folder / "pipeline", *overrides, *OPTIONS, *FREEZING, *PIPELINE, made_up_times=True)
    assert (alone.error, pipeline.error) == ("", "")
    assert pipeline.losses == pytest.approx(alone.losses, abs=1e-10)
    assert pipeline.losses[-1] < 0.9 * pipeline.losses[0]
    assert pipeline.summary["metric"]["num_samples"] == 13
    for name, value in alone.summary["metrics"]["dev"].items():
        assert pipeline.summary["metrics"]["dev"][name] == pytest.approx(value, abs=1e-10)
    return alone, pipeline


def test_words_are_tagged_alike_in_a_pipeline_and_the_saved_model_knows_the_tags(
    pool: Pool, tmp_path: Path, tagged: tuple[str, ...]
) -> None:
    from transformers import AutoModelForTokenClassification

    _, pipeline = alone_and_in_a_pipeline(pool, tmp_path, *tagged)
    assert pipeline.summary["metric"]["name"] == "f1"
    assert pipeline.summary["metric"]["value"] > 0.9
    saved = AutoModelForTokenClassification.from_pretrained(tmp_path / "pipeline" / "model")
    assert saved.config.id2label == {0: "B-NOUN", 1: "B-VERB", 2: "O"}


def test_a_decoder_learns_completions_alike_in_a_pipeline(
    pool: Pool, tmp_path: Path, prompted: tuple[str, ...]
) -> None:
    from transformers import AutoModelForCausalLM

    _, pipeline = alone_and_in_a_pipeline(pool, tmp_path, *prompted)
    assert [*pipeline.summary["metrics"]["dev"]] == ["loss", "perplexity", "token_accuracy"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "pipeline" / "model").config.model_type == "gpt2"


def test_tags_of_words_are_written_for_each_sentence(pool: Pool, tmp_path: Path, tagged: tuple[str, ...]) -> None:
    job = recorded(pool, tmp_path / "run", *tagged)
    (results,) = pool.run(1, scored, job.folder, None, [], tmp_path, True)
    rows = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    assert [" ".join(row["words"]) for row in rows] == sentences(13)
    assert [row["target"] for row in rows] == [[TAGS[word] for word in row["words"]] for row in rows]
    pairs = [pair for row in rows for pair in zip(row["prediction"], row["target"], strict=True)]
    assert np.mean([guess == truth for guess, truth in pairs]) == pytest.approx(results["dev"]["token_accuracy"])


def test_documents_are_scored_one_by_one_though_training_packs_them(
    pool: Pool, tmp_path: Path, prompted: tuple[str, ...]
) -> None:
    job = recorded(pool, tmp_path / "run", *prompted, "dataset.pack=true")
    (results,) = pool.run(1, scored, job.folder, None, ["train", "dev"], tmp_path, True)
    assert json.loads((tmp_path / "metrics.json").read_text())["splits"] == results
    assert results["dev"]["loss"] == pytest.approx(job.summary["metrics"]["dev"]["loss"], abs=1e-10)
    for split, count in (("train", 23), ("dev", 13)):
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        assert len(rows) == results[split]["num_samples"] == count
        losses, weights = zip(*((row["loss"], row["num_tokens"]) for row in rows), strict=True)
        assert np.average(losses, weights=weights) == pytest.approx(results[split]["loss"])


def recorded(pool: Pool, folder: Path, *overrides: str) -> Job:
    """A short run with the record of its settings that the command writes."""
    options = (*overrides, *OPTIONS, "epochs=1", "freeze=none")
    job = run_job(pool, 1, folder, *options, made_up_times=True)
    assert job.error == ""
    write_config(loaded(*options), folder)
    return job


def test_words_that_were_cut_are_reported_once(pool: Pool, tmp_path: Path, tagged: tuple[str, ...]) -> None:
    (tmp_path / "train.txt").write_text("a O\n" * 20 + "bird B-NOUN\n\na O\n\nbird B-NOUN\n" * 4)
    job = run_job(pool, 2, tmp_path / "run", *tagged, f"dataset.path={tmp_path}", *OPTIONS, "dataset.max_length=8",
                  "batch_size=2", "epochs=1", made_up_times=True)  # fmt: skip
    assert job.error == ""
    assert [text[:32] for text in job.messages if "no token" in text] == ["13 words of the train split coun"]

"""Whole runs of the tasks with a target for each token, from files to a saved model."""

from pathlib import Path

import pytest
from support.jobs import Job, run_job
from support.pool import Pool
from support.texts import SENTENCES, write_decoder, write_encoder

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
    alone = run_job(pool, 1, folder / "alone", *overrides, *OPTIONS, *FREEZING)
    pipeline = run_job(pool, 2, folder / "pipeline", *overrides, *OPTIONS, *FREEZING, *PIPELINE)
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


def test_words_that_were_cut_are_reported_once(pool: Pool, tmp_path: Path, tagged: tuple[str, ...]) -> None:
    (tmp_path / "train.txt").write_text("a O\n" * 20 + "bird B-NOUN\n\na O\n\nbird B-NOUN\n" * 4)
    job = run_job(pool, 2, tmp_path / "run", *tagged, f"dataset.path={tmp_path}", *OPTIONS, "dataset.max_length=8",
                  "batch_size=2", "epochs=1")  # fmt: skip
    assert job.error == ""
    assert [text[:32] for text in job.messages if "no token" in text] == ["13 words of the train split coun"]

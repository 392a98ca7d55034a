"""Whole runs on tables of texts: every task trains alike at any topology, and its saved model knows the classes."""

import json
import re
from collections import Counter
from pathlib import Path

import pandas
import pytest
import torch
from support.cases import VOCABULARY
from support.jobs import ROOT, Job, run_job
from support.pool import Pool
from support.texts import SENTENCES, WORDS, text_run, write_encoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

REVIEWS = ROOT / "examples" / "reviews.csv"
OPTIONS = (
    "precision=float64", "epochs=3", "batch_size=6", "optim.lr=0.01", "freeze=schedule", "freeze.num_frozen=[0,1]",
    "freeze.interval=0.7", "evaluate.every_epochs=3",
)  # fmt: skip
LABELS = {
    "classification": (["song", "sleep", "song", "sleep"], ["dataset.class_weights={song: 2, sleep: 1}"], "accuracy"),
    "multi_label": (["bird|song", "bird", "song", ""], ["dataset.label_separator='|'"], "micro_f1"),
    "regression": (["1.5", "-0.5", "1.0", "-1.0"], [], "pearson"),
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.mark.thinned("multi_label")
@pytest.mark.parametrize("task", LABELS)
def test_a_table_is_trained_on_alike_at_any_topology_and_saved_with_its_task(
    pool: Pool, tmp_path: Path, encoder: Path, task: str
) -> None:
    labels, options, metric = LABELS[task]
    file = tmp_path / "table.csv"
    pandas.DataFrame({"text": SENTENCES * 4, "label": labels * 4}).to_csv(file, index=False)
    run = [*text_run(encoder, "text", file), *options, *OPTIONS, f"dataset.eval_path={file}"]

    def job(name: str, world_size: int, *more: str) -> Job:
        return run_job(pool, world_size, tmp_path / name, *run, *more, made_up_times=True)

    alone = job("alone", 1)
    pipeline = job("pipeline", 2, "parallel.num_stages=2", "parallel.num_microbatches=2")
    assert not alone.error + pipeline.error
    assert pipeline.losses == pytest.approx(alone.losses, abs=1e-10)
    score = alone.summary["metric"]
    assert score["name"] == metric
    assert pipeline.summary["metric"]["value"] == pytest.approx(score["value"], abs=1e-10)
    assert alone.events("start")[0]["data_note"].startswith("label is ")
    config = AutoModelForSequenceClassification.from_pretrained(alone.folder / "model").config
    assert config.problem_type == {"classification": "single_label_classification"}.get(
        task, "multi_label_classification" if task == "multi_label" else task
    )
    names = sorted({name for label in labels for name in label.split("|")} - {""})
    assert config.id2label == ({0: "LABEL_0"} if task == "regression" else dict(enumerate(names)))


def test_the_reviews_are_read_and_transformers_gives_their_classes_by_name(pool: Pool, tmp_path: Path) -> None:
    counts = Counter(re.findall(r"\w+", REVIEWS.read_text()))
    words = [*WORDS[:4], *(word for word, _ in counts.most_common(VOCABULARY - 4))]
    run = text_run(write_encoder(tmp_path, words), "text", REVIEWS)
    columns = ["dataset.text=review", "dataset.label=stars", "dataset.max_length=16"]
    job = run_job(
        pool, 2, tmp_path / "run", *run, *columns, "epochs=4", "batch_size=16", "optim.lr=0.005", made_up_times=True
    )
    assert not job.error
    assert job.summary["metric"]["name"] == "accuracy"
    assert job.summary["metric"]["value"] > 0.3, "of five classes"
    start = job.events("start")[0]
    assert (start["dataset"], start["data_note"]) == ("reviews.csv", "stars is one of 5 classes (1, 2, 3, 4, 5)")
    model = AutoModelForSequenceClassification.from_pretrained(job.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(job.folder / "model")
    with torch.no_grad():
        logits = model(**tokenizer("this lamp is perfect", return_tensors="pt")).logits
    assert model.config.id2label[int(logits.argmax())] in "12345"


def test_predictions_and_targets_have_the_names_of_their_classes() -> None:
    from pipetransformer.training.saved_scores import with_names

    row = {"id": 0, "prediction": [0, 1, 1], "target": [1, 0, 0]}
    assert with_names(row, ("a", "b", "c")) == row | {"prediction_labels": ["b", "c"], "target_labels": ["a"]}
    row = {"id": 0, "prediction": 1, "target": 0}
    assert with_names(row, ("a", "b")) == row | {"prediction_label": "b", "target_label": "a"}
    for tags in (["a", "b"], ["b"], []):
        assert with_names({"prediction": tags}, ("a", "b")) == {"prediction": tags}, "which have names already"
    assert json.loads(json.dumps(with_names({"prediction": 0.5}, ()))) == {"prediction": 0.5}

"""Samples without labels are predicted by a run's model as its own library predicts them."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from support.jobs import TINY, Job, loaded, run_job
from support.pool import Pool
from support.saved import predicted
from support.texts import SENTENCES, text_run, write_encoder, write_squad, write_table
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipetransformer.config.compose import read_config
from pipetransformer.config.schema import CONFIG, write_config
from pipetransformer.data.base import TextFormat
from pipetransformer.data.text.table import TextDataset
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.report.rows import row_writer
from pipetransformer.training.saved_scores import predict


def recorded(pool: Pool, folder: Path, *overrides: str) -> Job:
    job = run_job(pool, 1, folder, *overrides, made_up_times=True)
    assert job.error == ""
    write_config(loaded(*overrides), folder)
    return job


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def texts(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run on texts, whose data is gone afterwards."""
    folder = tmp_path_factory.mktemp("texts")
    for name in ("train", "dev"):
        write_table(folder / f"{name}.tsv", [0, 1] * 8)
    options = text_run(write_encoder(folder / "encoder"), "sst2", folder)
    job = recorded(pool, folder / "run", *options, "epochs=2", "optim.lr=0.01")
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").unlink()
    return job


@pytest.fixture(scope="module")
def pictures(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return recorded(pool, tmp_path_factory.mktemp("pictures") / "run", *TINY)


def write_texts(folder: Path, ending: str) -> Path:
    file = folder / f"input.{ending}"
    if ending == "txt":
        file.write_text("\n".join(SENTENCES))
    elif ending == "jsonl":
        file.write_text("".join(json.dumps({"id": 7, "sentence": each}) + "\n" for each in SENTENCES))
    else:
        mark = {"csv": ",", "tsv": "\t"}[ending]
        file.write_text("\n".join([f"other{mark}sentence", *(f"x{mark}{each}" for each in SENTENCES)]) + "\n")
    return file


@pytest.mark.thinned("csv", "jsonl")
@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "txt"])
def test_texts_have_the_probabilities_that_transformers_gives_them(
    pool: Pool, texts: Job, tmp_path: Path, ending: str
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(texts.folder / "model").eval()
    tokens = AutoTokenizer.from_pretrained(texts.folder / "model")(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**tokens).logits.softmax(1).numpy()
    (ended,) = pool.run(1, predicted, texts.folder, write_texts(tmp_path, ending), tmp_path / "out.jsonl")
    assert ended == (4, texts.summary["model"]["step"])
    rows = lines(tmp_path / "out.jsonl")
    assert [row["row"] for row in rows] == [0, 1, 2, 3]
    assert [row["prediction"] for row in rows] == [("negative", "positive")[each] for each in expected.argmax(1)]
    scores = np.array([list(dict(row["scores"]).values()) for row in rows])  # type: ignore[call-overload]
    assert list(dict(rows[0]["scores"])) == ["negative", "positive"]  # type: ignore[call-overload]
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    pool.run(1, predicted, texts.folder, write_texts(tmp_path, ending), tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["row", "prediction", "scores_negative", "scores_positive"]
    assert [float(row["scores_positive"]) for row in table] == scores[:, 1].tolist()


@pytest.mark.thinned("any classes")
@pytest.mark.parametrize(
    ("labels", "options"),
    [(["song", "sleep"] * 2, []), (["bird|song", "bird", "song", ""], ["dataset.label_separator='|'"])],
    ids=["one class", "any classes"],
)
def test_rows_of_a_table_have_the_probabilities_that_transformers_gives_them(
    pool: Pool, tmp_path: Path, labels: list[str], options: list[str]
) -> None:
    rows = [f"{text},{label}" for text, label in zip(SENTENCES * 3, labels * 3, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["text,label", *rows, ""]))
    run = text_run(write_encoder(tmp_path / "encoder"), "text", tmp_path / "table.csv")
    job = recorded(pool, tmp_path / "run", *run, *options, "epochs=1", "optim.lr=0.01")
    (tmp_path / "table.csv").unlink()
    (tmp_path / "input.csv").write_text("\n".join(["text", *SENTENCES, ""]))
    pool.run(1, predicted, job.folder, tmp_path / "input.csv", tmp_path / "out.jsonl")
    model = AutoModelForSequenceClassification.from_pretrained(job.folder / "model").eval()
    tokens = AutoTokenizer.from_pretrained(job.folder / "model")(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens).logits
    expected = logits.sigmoid() if options else logits.softmax(1)
    found = lines(tmp_path / "out.jsonl")
    names = [*model.config.id2label.values()]
    assert [list(dict(row["scores"]).values()) for row in found] == [  # type: ignore[call-overload]
        pytest.approx(each, abs=1e-6) for each in expected.tolist()
    ]
    classes = [[names[i] for i in (each > 0.5).nonzero().flatten()] for each in expected]
    likeliest = [names[int(each.argmax())] for each in expected]
    assert [row["prediction"] for row in found] == (classes if options else likeliest)


def test_texts_to_predict_may_be_numbers(tmp_path: Path) -> None:
    """The run has said which column holds texts."""
    (tmp_path / "input.csv").write_text("text\n12\n-3.5\n")
    model = HuggingFaceModel(name=str(write_encoder(tmp_path / "encoder")), pretrained=False)
    head = Head("sequence", 2, ("a", "b"))
    found = TextDataset(path="away").unlabelled(tmp_path / "input.csv", TextFormat(**model.input_format()), head)
    assert len(found.split) == 2


def test_values_are_predicted_where_the_run_learned_values(pool: Pool, tmp_path: Path) -> None:
    rows = [f"{first}\t{SENTENCES[0]}\t{place}.5" for place, first in enumerate(SENTENCES)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows, ""]))
    options = text_run(write_encoder(tmp_path / "encoder"), "glue/stsb", tmp_path)
    recorded(pool, tmp_path / "run", *options, "epochs=1")
    source = tmp_path / "input.csv"
    source.write_text('sentence1,sentence2\n"a bird, sings",bird\n')
    pool.run(1, predicted, tmp_path / "run", source, tmp_path / "out.jsonl")
    (row,) = lines(tmp_path / "out.jsonl")
    assert isinstance(row["prediction"], float)
    assert row.keys() == {"row", "prediction"}


@pytest.mark.parametrize("is_list", [False, True])
def test_pictures_of_a_folder_or_a_list_have_the_probabilities_that_timm_gives_them(
    pool: Pool, pictures: Job, tmp_path: Path, is_list: bool
) -> None:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (3, 8, 8), dtype=np.uint8)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    names = ["a.png", "b.png", "deep/c.png"]
    for name, each in zip(names, pixels, strict=True):
        Image.fromarray(each).save(tmp_path / "in" / name)
    source = tmp_path / "in"
    if is_list:
        names = [names[2], names[0]]
        pixels = pixels[[2, 0]]
        source = tmp_path / "in" / "list.txt"
        source.write_text("\n".join(names))
    pool.run(1, predicted, pictures.folder, source, tmp_path / "out.jsonl")
    rows = lines(tmp_path / "out.jsonl")
    model = timm.create_model(f"local-dir:{pictures.folder / 'model'}", pretrained=True).eval()
    with torch.no_grad():
        expected = model((torch.from_numpy(pixels)[:, None].float() / 255 - 0.5) / 0.5).softmax(1).numpy()
    assert [row["file"] for row in rows] == names
    assert [row["prediction"] for row in rows] == [str(each) for each in expected.argmax(1)]
    scores = [list(dict(row["scores"]).values()) for row in rows]  # type: ignore[call-overload]
    np.testing.assert_allclose(np.array(scores), expected, atol=1e-6)


def test_questions_are_answered_from_their_context(pool: Pool, tmp_path: Path) -> None:
    options = text_run(write_encoder(tmp_path / "encoder"), "squad", write_squad(tmp_path / "squad.json", start=2))
    recorded(pool, tmp_path / "run", *options, "dataset.stride=4", "dataset.max_length=12", "epochs=4", "optim.lr=0.01")
    table = tmp_path / "input.csv"
    table.write_text("id,question,context\nfirst,a,a bird sings\n2,a,bird sings a bird\n")
    pool.run(1, predicted, tmp_path / "run", table, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["first", "2"]
    contexts = ("a bird sings", "bird sings a bird")
    assert all(row["prediction"] and row["prediction"] in text for row, text in zip(rows, contexts, strict=True))
    paragraph = {"context": "a bird sings", "qas": [{"id": "q", "question": "a"}]}
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    pool.run(1, predicted, tmp_path / "run", asked, tmp_path / "out.jsonl")
    (row,) = lines(tmp_path / "out.jsonl")
    assert row == {"id": "q", "prediction": rows[0]["prediction"]}, "the same question"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.csv", None, "does not exist"),
        ("in.csv", "text\na\n", "has the columns text; the task needs sentence"),
        ("in.csv", "sentence,b\na\n", "in.csv line 2 has 1 cells and the header has 2"),
        ("in.csv", "sentence\n", "has columns .sentence. and no rows"),
        ("in.csv", "", "in.csv is empty"),
        ("in.jsonl", "{\n", "in.jsonl line 1 is no JSON"),
        ("in.jsonl", "[1]\n", "row 0 is a number; give an object"),
        ("in.jsonl", '{"sentence": "a"}\n{"other": 1}\n', "row 1 of .* has no sentence"),
        ("in.xlsx", "x", "its name ends in .xlsx; give one of .csv"),
    ],
)
def test_what_cannot_be_read_is_refused(
    texts: Job, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    config = read_config(texts.folder / CONFIG, with_data=False)
    with pytest.raises(UserError, match=message):
        predict(texts.folder, config, tmp_path / name, tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_several_classes_in_a_cell_are_json(tmp_path: Path) -> None:
    rows = [
        {"row": 0, "prediction": ["it's", "é"], "scores": {"é": 0.75}},
        {"row": 1, "prediction": [], "scores": {"é": 0}},
    ]
    assert row_writer(tmp_path / "out.csv")(rows) == 2
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [json.loads(row["prediction"]) for row in table] == [["it's", "é"], []]
    assert table[0] == {"row": "0", "prediction": '["it\'s", "é"]', "scores_é": "0.75"}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("taken.csv", "is there already; give another file"),
        ("out.parquet", r"has to end in \.csv or \.jsonl"),
        ("no/out.csv", "in a folder that is there"),
    ],
)
def test_no_file_is_overwritten(texts: Job, tmp_path: Path, output: str, message: str) -> None:
    (tmp_path / "taken.csv").write_text("mine")
    config = read_config(texts.folder / CONFIG, with_data=False)
    with pytest.raises(UserError, match=message):
        predict(texts.folder, config, write_texts(tmp_path, "txt"), tmp_path / output)
    assert (tmp_path / "taken.csv").read_text() == "mine"


def test_pictures_of_another_size_than_the_runs_are_refused(pictures: Job, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((10, 10), dtype=np.uint8)).save(tmp_path / "a.png")
    config = read_config(pictures.folder / CONFIG)
    for source, message in (
        (tmp_path, r"\(1, 10, 10\).*trained on \(1, 8, 8\); .*model\.image_size=8"),
        (tmp_path / "none", "not exist"),
    ):
        with pytest.raises(UserError, match=message):
            predict(pictures.folder, config, source, tmp_path / "out.csv")
    resized = read_config(pictures.folder / CONFIG, ["model.image_size=8"])
    assert predict(pictures.folder, resized, tmp_path, tmp_path / "resized.csv")[0] == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no pictures"):
        predict(pictures.folder, config, tmp_path / "empty", tmp_path / "out.csv")
    (tmp_path / "list.txt").write_text("lost.png\n")
    with pytest.raises(UserError, match=r"lists lost\.png, which is not there"):
        predict(pictures.folder, config, tmp_path / "list.txt", tmp_path / "out.csv")

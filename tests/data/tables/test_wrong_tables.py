"""Wrong files and columns: each is answered in one line with file, row and column, before any process starts."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest

from pipetransformer.data.tables.base import ROWS_PER_BATCH
from pipetransformer.data.tables.delimited import MOST_CHARACTERS
from pipetransformer.data.text.table import TextDataset
from pipetransformer.errors import UserError

GOOD = "review,stars\nfine film,1\nbad film,2\nso so,1\n"
LINES = [{"review": "fine film", "stars": 1}, {"review": "bad film", "stars": 2}]


def lines(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def labelled(*labels: Any) -> str:
    return lines(*({"review": "fine film", "stars": label} for label in labels))


def write_floats(file: Path) -> None:
    """Labels of which one is not a number, which pandas would write as null."""
    labels = pa.array([0.0, 1.0, float("nan"), 1.0])
    pyarrow.parquet.write_table(pa.table({"review": ["a", "b", "c", "d"], "stars": labels}), file)


def write_maps(file: Path) -> None:
    """A column that no option names, of a type that ``datasets`` does not know."""
    maps = pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64()))
    pyarrow.parquet.write_table(pa.table({"review": ["a", "b"], "stars": [0, 1], "more": maps}), file)


@dataclass(frozen=True)
class Wrong:
    """Files by name with their content, options, and words of the answer. The path is the only file, or the folder."""

    files: dict[str, str | bytes | Callable[[Path], Any]]
    words: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    path: str | None = None


def csv(content: str | bytes, words: list[str], **options: Any) -> Wrong:
    return Wrong({"reviews.csv": content}, words, options)


def jsonl(content: str | bytes, words: list[str], **options: Any) -> Wrong:
    return Wrong({"reviews.jsonl": content}, words, options)


PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(16)
WRONG: dict[str, Wrong] = {
    # files
    "missing file": Wrong({}, ["reviews.csv does not exist"], path="reviews.csv"),
    "missing evaluation file": csv(GOOD, ["dataset.eval_path=nowhere.csv is no file"], eval_path="nowhere.csv"),
    "empty file": csv("", ["reviews.csv is empty"]),
    "header only": csv("review,stars\n", ["reviews.csv has columns (review, stars) and no rows"]),
    "no header": csv(
        "fine film,1\nbad film,2\nso so,1\n", ["dataset.text=review: ", "no such column; it has fine film, 1"]
    ),
    "blank lines": csv("\n\n\n", ["reviews.csv is empty"]),
    "one row": csv("review,stars\nfine film,1\n", ["reviews.csv has 1 row", "dataset.eval_path="]),
    "picture": Wrong({"cat.png": PNG}, ["cat.png is no table: its name ends in .png", ".csv, .tsv"]),
    "picture named as a table": csv(PNG, ["reviews.csv line 1 is not UTF-8 (byte 0x89)"]),
    "no ending": Wrong({"reviews": GOOD}, ["its name ends in nothing"]),
    "spreadsheet": Wrong({"reviews.xlsx": b"PK\3\4"}, ["its name ends in .xlsx"]),
    "compressed": Wrong({"reviews.csv.gz": b"\x1f\x8b"}, ["its name ends in .gz"]),
    "pickle": Wrong({"reviews.pkl": b"\x80\4"}, ["its name ends in .pkl"]),
    "latin-1": csv(
        "review,stars\nfin\xe9,1\n".encode("latin-1"), ["line 2 is not UTF-8 (byte 0xe9)", "iconv -f LATIN1"]
    ),
    "utf-16": csv(GOOD.encode("utf-16"), ["is UTF-16, not UTF-8; convert it: iconv -f UTF-16"]),
    "NUL byte": csv(GOOD + "nul\0,1\n", ["reviews.csv line 5 has a NUL byte"]),
    # rows of delimited files
    "wrong delimiter": csv(
        GOOD.replace(",", ";"), ["no such column; it has review;stars", "dataset.delimiter=semicolon"]
    ),
    "tabs in csv": csv(GOOD.replace(",", "\t"), ["dataset.delimiter=tab"]),
    "too many cells": csv(
        GOOD + "good, but long,1\n", ["reviews.csv line 5 has 3 cells and the header has 2", "quotes"]
    ),
    "too few cells": csv(GOOD + "alone\n", ["reviews.csv line 5 has 1 cells and the header has 2"]),
    "ragged after a quoted line break": csv(
        'review,stars\n"two\nlines",1\nalone\n', ["reviews.csv line 4 has 1 cells"]
    ),
    "open quote": csv('review,stars\n"never closed,1\nbad film,2\n', ["reviews.csv line 2 cannot be read", '""']),
    "text after a quote": csv('review,stars\n"fine" film,1\n', ["reviews.csv line 2 cannot be read", '""']),
    "giant cell": csv(
        "review,stars\n" + "x" * (MOST_CHARACTERS + 1) + ",1\n", ["reviews.csv line 2 cannot be read", "field limit"]
    ),
    "twice the same column": csv("review,stars,stars\na,1,1\n", ["has two columns 'stars'; rename or remove one"]),
    "columns without a name": csv("review,stars,,\na,1,,\n", ["has 2 columns without a name; name or remove"]),
    "a missing number": csv(
        "review,stars\n" + "".join(f"film {n},{n / 2}\n" for n in range(9)) + "last,NA\n",
        ["dataset.label=stars: ", "line 11 has 'NA' among numbers; write a number there", "dataset.task="],
    ),
    "a missing number among whole ones": csv(
        GOOD + "good,n/a\n", ["line 5 has 'n/a' among numbers; write a number there or remove the row"]
    ),
    "a decimal comma": csv(
        'review,stars\nfine,1\nbad,"0,5"\nso so,"1,5"\n', ["line 3 has '0,5' among numbers; write it with a point"]
    ),
    "quotes in tsv": Wrong(
        {"reviews.tsv": 'review\tstars\n"a\ttab"\t1\n'}, ["line 2 has 3 cells", "no quotes", "dataset.delimiter=tab"]
    ),
    "a column of maps": Wrong(
        {"reviews.parquet": write_maps},
        ["column of a type that datasets does not know", "remove the column or write it"],
    ),
    # JSON
    "broken line": jsonl(lines(*LINES, '{"review": "cut', LINES[0]), ["reviews.jsonl line 3 is no JSON", "column 12"]),
    "line that is a list": jsonl(lines(LINES[0], [1, 2]), ["reviews.jsonl line 2 is a list; give an object"]),
    "line that is a number": jsonl(lines(LINES[0], 7), ["reviews.jsonl line 2 is a number; give an object"]),
    "object over many lines": jsonl(
        json.dumps(LINES[0], indent=1), ["reviews.jsonl line 1 is no JSON", "one object per"]
    ),
    "empty JSON": jsonl("", ["reviews.jsonl has no rows"]),
    "empty list": Wrong({"reviews.json": "[]"}, ["reviews.json has no rows"]),
    "broken list": Wrong({"reviews.json": '[{"review": "a"},\n{"review"}]'}, ["reviews.json line 2 is no JSON"]),
    "list of texts": Wrong({"reviews.json": '["a", "b"]'}, ["reviews.json row 0 is text; give an object"]),
    "too deep": Wrong({"reviews.json": "[" * 100_000}, ["reviews.json line 1 is no JSON"]),
    "mixed types": jsonl(
        lines(*LINES, {"review": "so so", "stars": "two"}),
        ['stars is text in line 3 ("two") and a number in line 1; give it one type'],
    ),
    "half a character": jsonl('{"review": "\\ud83d", "stars": 1}\n', ["reviews.jsonl", "review"]),
    "half a character in a later line": jsonl(
        lines(*LINES, {"review": "fine \ud800", "stars": 1}, *LINES),
        ['reviews.jsonl line 3: review has "\\ud800", half of a character', "write both, or remove it"],
    ),
    "objects of several types": jsonl(
        lines(*({"review": "a", "stars": 1, "meta": {"n": n}} for n in (1, 2, None, "x", 3))),
        ['reviews.jsonl line 4: meta is {"n": "x"}, and its values have no common type', "or remove the column"],
    ),
    "objects of several types after many rows": jsonl(
        lines(*({"review": "a", "stars": 1, "meta": {"n": n}} for n in [1] * ROWS_PER_BATCH + ["x"])),
        ["a column has no common type in all rows", "meta has incompatible types", "give it one, or remove it"],
    ),
    "mixed types of a list": Wrong(
        {"reviews.json": json.dumps([*LINES, {"review": "a", "stars": "x"}])},
        ['stars is text in row 2 ("x") and a number in row 0'],
    ),
    "a carriage return in a cell": Wrong(
        {"reviews.tsv": "review\tstars\nfine\t1\nb\rad\t2\n"},
        ["reviews.tsv line 3 has a carriage return within a cell; remove it, or if lines end in one alone, convert"],
    ),
    "number too large": jsonl(labelled(2**70), ["reviews.jsonl", "stars"]),
    # columns with types
    "broken parquet": Wrong({"reviews.parquet": b"PAR1 and then nothing"}, ["reviews.parquet is no .parquet file"]),
    "empty parquet": Wrong({"reviews.parquet": b""}, ["reviews.parquet is no .parquet file"]),
    "broken arrow": Wrong({"reviews.arrow": b"nothing of the kind"}, ["reviews.arrow is no .arrow file"]),
    "dates as labels": Wrong(
        {
            "a.parquet": lambda file: pandas.DataFrame(
                {"review": ["a", "b"], "stars": pandas.to_datetime(["2026", "2025"])}
            ).to_parquet(file)
        },
        ["cells of type timestamp", "cannot read"],
    ),
    # folders
    "empty folder": Wrong({}, ["has no tables; give a table (.csv, .tsv"], path="."),
    "folder without tables": Wrong({"a.txt": "x", "b.txt": "x"}, ["has no tables"], path="."),
    "two files for a split": Wrong(
        {"train.csv": GOOD, "train.jsonl": lines(*LINES)}, ["has 2 files for train: train.csv, train.jsonl"], path="."
    ),
    "two versions of a split": Wrong({"train.csv": GOOD, "train_v2.csv": GOOD}, ["has 2 files for train"], path="."),
    "missing shard": Wrong({"train-00000-of-00002.csv": GOOD}, ["has 1 of 2 shards of train"], path="."),
    "no training file": Wrong(
        {"dev.csv": GOOD, "test.csv": GOOD},
        ["dataset.train_split=train: there is no such split; there are dev, test"],
        path=".",
    ),
    "shards with other columns": Wrong(
        {"train-00000-of-00002.csv": GOOD, "train-00001-of-00002.csv": "text,stars\na,1\n"},
        ["are of one split, and only one has review, text"],
        path=".",
    ),
    "misspelled split": Wrong(
        {"train.csv": GOOD, "dev.csv": GOOD},
        ["dataset.eval_split=dve: there is no such split"],
        {"eval_split": "dve"},
        ".",
    ),
    "evaluation data without the column": Wrong(
        {"train.csv": GOOD, "dev.csv": "review\nfine film\n"},
        ["dataset.label=stars: ", "dev.csv has no such column"],
        path=".",
    ),
    "another name of the labels in the test data": Wrong(
        {"train.csv": GOOD, "test.csv": "review,star\nfine film,1\n"},
        ["dataset.label=stars: ", "test.csv has no such column", "did you mean star?"],
        path=".",
    ),
    "a split without labels that is asked for": Wrong(
        {"train.csv": GOOD, "test.csv": "review,stars\nfine film,\nbad film,\n"},
        ["dataset.eval_split=test: ", "test.csv has nothing in stars; name data with labels, or drop the option"],
        {"eval_split": "test"},
        ".",
    ),
    "broken saved folder": Wrong(
        {"state.json": '{"_data_files": []}', "dataset_info.json": "{"}, ["cannot be read", "save_to_disk"], path="."
    ),
    "saved folder that leads elsewhere": Wrong(
        {"state.json": '{"_data_files": [{"filename": "../secret.arrow"}]}', "dataset_info.json": "{}"},
        ["names a file out of its folder (../secret.arrow)"],
        path=".",
    ),
    # columns
    "misspelled text": csv(
        GOOD,
        ["dataset.text=reviw: ", "reviews.csv has no such column; it has review, stars; did you mean review?"],
        text="reviw",
    ),
    "misspelled label": csv(GOOD, ["dataset.label=Stars: ", "did you mean stars?"], label="Stars"),
    "one text twice": csv(GOOD, ["names a column twice"], text=["review", "review"]),
    "three texts": csv(GOOD, ["names 3 columns; give one, or two"], text=["a", "b", "c"]),
    "label as text": csv(GOOD, ["is a column of dataset.text= too"], label="review"),
    "numbers as text": csv("review,stars\n12,1\n-3.5,2\n7,1\n", ["dataset.text=review: ", "nothing but numbers"]),
    "numbers in a text column": jsonl(
        lines({"review": 1, "stars": 1}, {"review": 2, "stars": 2}), ["cells of type int64"]
    ),
    "lists as text": jsonl(lines(*({"review": ["a"], "stars": n} for n in (1, 2))), ["cells of type list"]),
    "blank text": csv(GOOD + '" ",1\n', ["reviews.csv line 5 has no review; write a text there or remove the row"]),
    "null text": jsonl(lines(*LINES, {"review": None, "stars": 1}), ["reviews.jsonl line 3 has no review"]),
    # labels
    "null label": Wrong(
        {"train.jsonl": labelled(1, 2, None, 1, None), "dev.csv": GOOD},
        ["train.jsonl line 3 has no stars, and 2 rows have none; write a label there or remove the row"],
        path=".",
    ),
    "missing label": jsonl(lines(*LINES, {"review": "a"}), ["reviews.jsonl line 3 has no stars; write a label"]),
    "empty label": csv(GOOD + "so so,\n", ["reviews.csv line 5 has no stars; write a label there"]),
    "NaN for a class": Wrong(
        {"train.parquet": write_floats, "dev.csv": GOOD},
        ["train.parquet row 2 has no stars; write a label there or remove the row"],
        {"task": "classification"},
        path=".",
    ),
    "one class": csv("review,stars\na,1\nb,1\nc,1\n", ["dataset.label=stars: ", "only the class 1; give rows of two"]),
    "label of the evaluation data alone": Wrong(
        {"train.csv": GOOD, "dev.csv": "review,stars\na,1\nb,3\n"},
        ["dev.csv line 3: stars is '3', which is no label of the training data (1, 2)", "dataset.labels=[...]"],
        path=".",
    ),
    "label that is not named": csv(
        GOOD, ["line 3: stars is '2', which is none of dataset.labels= (1, 3)"], labels=["1", "3"]
    ),
    "not a number": csv(GOOD + "a,nan\nb,0.5\n", ["line 5: stars is 'nan', and regression needs a finite number"]),
    "infinity": jsonl(labelled(0.5, float("inf"), 1.5), ["line 2: stars is inf, and regression needs"]),
    "words for regression": csv(GOOD + "a,good\n", ["line 5: stars is 'good', and regression"], task="regression"),
    "comma for a point": csv(
        'review,stars\na,"1,5"\nb,"2,5"\n', [",5'", "regression needs a finite number"], task="regression"
    ),
    "lists for one class": jsonl(
        labelled(["a"], ["b"]), ["cells of type list", "dataset.task=classification"], task="classification"
    ),
    "texts for several classes": csv(GOOD, ["needs lists", "dataset.label_separator="], task="multi_label"),
    "null in a list": jsonl(labelled(["a", "b"], ["a", None]), ["reviews.jsonl line 2 has a null among its stars"]),
    "null for a list": jsonl(labelled(["a", "b"], None), ["reviews.jsonl line 2 has no stars; write an empty list"]),
    "numbers for too few classes": jsonl(labelled([1.0, 0.0], [1.0]), ["line 2: stars has 1 numbers, and there are 2"]),
    "words for a number of each class": Wrong(
        {"train.jsonl": labelled([0, 1], [1, 0]), "dev.jsonl": labelled(["a", "b"])},
        ["dev.jsonl has cells of type list<", "in stars, and the training data lists of a 0 or 1"],
        path=".",
    ),
    "numbers between the classes": jsonl(
        labelled([1.0, 0.0], [0.5, 0.0]), ["line 2: stars has other numbers than 0 and 1"]
    ),
    "a column for each class that counts": csv(
        "review,rude,spam\na,0,1\nb,2,0\nc,0,0\n",
        ["line 3: rude is '2', and several columns are 0 or 1"],
        label=["rude", "spam"],
    ),
    "texts as labels": csv(
        "review,stars\n" + "".join(f"a,text {n}\n" for n in range(200)),
        ["200 different texts there, more than the 100", "name another column"],
    ),
    # options of labels
    "separator of one class": csv(
        GOOD,
        ["dataset.label_separator=| has no effect, as a sample has one label with dataset.task=classification; drop"],
        task="classification",
        label_separator="|",
    ),
    "separator of lists": jsonl(
        labelled(["a"], ["b"]),
        ["dataset.label_separator=| has no effect, as dataset.label=stars: ", "reviews.jsonl has lists there; drop it"],
        label_separator="|",
    ),
    "separator of columns": csv(
        "review,rude,spam\na,0,1\nb,1,0\nc,0,0\n",
        ["dataset.label_separator=| has no effect, as dataset.label=[rude,spam] names a column for each class; drop"],
        label=["rude", "spam"],
        label_separator="|",
    ),
    "weights of other classes": csv(
        GOOD, ["dataset.class_weights: 3 is no class"], class_weights={"1": 1, "2": 1, "3": 1}
    ),
    "a weight too few": csv(GOOD, ["dataset.class_weights: 2 has no weight"], class_weights={"1": 1}),
    "weights for too many": csv(GOOD, ["3 weights, and there are 2 classes: 1, 2"], class_weights=[1, 1, 1]),
    "negative weight": csv(GOOD, ["dataset.class_weights=[1, -1] is none of"], class_weights=[1, -1]),
    "balance without a sample": csv(
        GOOD, ["no training sample has the class 3"], class_weights="balanced", labels=["1", "2", "3"]
    ),
    "weights of values": csv(
        "review,stars\na,0.5\nb,1.5\n", ["dataset.class_weights=balanced has no effect"], class_weights="balanced"
    ),
    "smoothing of values": csv(
        "review,stars\na,0.5\nb,1.5\n", ["dataset.label_smoothing=0.1 has no effect"], label_smoothing=0.1
    ),
    "metric of another task": csv(
        GOOD, ["mse is no metric of dataset.task=classification"], metrics=["accuracy", "mse"]
    ),
    "an error as the main metric": csv(GOOD, ["needs a main metric"], metrics=["mse", "pearson"]),
    "unknown metric": csv(GOOD, ["dataset.metrics: acuracy is no metric here"], metrics=["acuracy"]),
}


def look_at(spec: TextDataset) -> None:
    """What the launcher does before it starts a process."""
    spec.check()
    spec.preflight()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_table_is_answered_in_one_line(name: str, tmp_path: Path) -> None:
    wrong = WRONG[name]
    for file, content in wrong.files.items():
        if callable(content):
            content(tmp_path / file)
        else:
            (tmp_path / file).write_bytes(content.encode() if isinstance(content, str) else content)
    path = tmp_path / (wrong.path or next(iter(wrong.files)))
    options = {"text": "review", "label": "stars"} | wrong.options
    with pytest.raises(UserError) as refused:
        look_at(TextDataset(path=str(path), **options))
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 400 + 3 * len(str(tmp_path)), message
    assert all(word in message for word in wrong.words), message
    assert ("a type that datasets does not know" in message) == (name == "a column of maps"), message

"""Which rows of a table train and which evaluate, and what is said where that is not clear."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from pipetransformer.data.base import Data, ImageFormat, TextFormat
from pipetransformer.data.tables import splits as table_splits
from pipetransformer.data.tables.spec import Tables, TableSpec
from pipetransformer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Spec(TableSpec):
    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        raise NotImplementedError


def write(file: Path, first: int, last: int) -> Path:
    file.write_text("\n".join(["n", *map(str, range(first, last))]) + "\n")
    return file


def tables(**options: Any) -> Tables:
    spec = Spec(**options)
    spec.check()
    return spec.tables()


def numbers(rows: Any) -> list[int]:
    return [int(cell) for cell in rows.column("n").to_pylist()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("train", "test", "dev", "gold")):
        write(tmp_path / f"{name}.csv", 10 * number, 10 * number + 10)
    return tmp_path


def test_validation_data_come_before_test_data(folder: Path) -> None:
    found = tables(path=str(folder))
    assert (found.eval_name, numbers(found.train), numbers(found.evaluation)) == (
        "dev",
        [*range(10)],
        [*range(20, 30)],
    )


def test_splits_are_chosen_by_name(folder: Path) -> None:
    found = tables(path=str(folder), train_split="gold", eval_split="test")
    assert (found.eval_name, numbers(found.train)[0], numbers(found.evaluation)[0]) == ("test", 30, 10)


def test_another_file_is_evaluated_on(folder: Path) -> None:
    found = tables(path=str(folder / "train.csv"), eval_path=str(folder / "gold.csv"))
    assert (found.eval_name, len(found.train), numbers(found.evaluation)[0]) == ("gold", 10, 30)


def test_a_file_to_evaluate_on_may_have_any_name(folder: Path, tmp_path: Path) -> None:
    for name, expected in (("held_out", "held_out"), ("train", "evaluation")):
        (tmp_path / "other").mkdir(exist_ok=True)
        file = shutil.copy(folder / "gold.csv", tmp_path / "other" / f"{name}.csv")
        found = tables(path=str(folder / "train.csv"), eval_path=str(file))
        assert (found.eval_name, len(found.train), numbers(found.evaluation)[0]) == (expected, 10, 30)
    shutil.copy(folder / "gold.csv", folder / "held_out.csv")
    found = tables(path=str(folder), eval_split="held_out")
    assert (found.eval_name, len(found.train), numbers(found.evaluation)[0]) == ("held_out", 10, 30)


@pytest.mark.parametrize(("num_rows", "fraction", "num_eval"), [(100, 0.1, 10), (2, 0.01, 1), (3, 0.99, 2)])
def test_without_evaluation_data_a_fixed_draw_is_held_out(
    tmp_path: Path, num_rows: int, fraction: float, num_eval: int
) -> None:
    file = write(tmp_path / "all.csv", 0, num_rows)
    found, again = (tables(path=str(file), eval_fraction=fraction) for _ in range(2))
    held_out = numbers(found.evaluation)
    assert (found.eval_name, len(held_out)) == ("held_out", num_eval)
    assert sorted(held_out + numbers(found.train)) == [*range(num_rows)]
    assert numbers(again.evaluation) == held_out == sorted(held_out)
    assert len(found.known) == num_rows
    if num_rows == 100:
        assert held_out != [*range(10)]
        assert held_out != [*range(90, 100)]


def test_limits_draw_from_each_split_and_rows_keep_their_places(tmp_path: Path) -> None:
    file = write(tmp_path / "all.csv", 0, 50)
    found = tables(path=str(file), max_train_samples=7, max_eval_samples=3)
    assert (len(found.train), len(found.evaluation), len(found.known)) == (7, 3, 50)
    assert [found.train.at(row) for row in range(7)] == [f"{file} line {n + 2}" for n in numbers(found.train)]


def test_the_hub_is_asked_for_configuration_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: str, **options: str) -> datasets.DatasetDict:
        asked.append((names, options))
        rows = datasets.Dataset.from_dict({"n": [*range(4)]})
        return datasets.DatasetDict({"train": rows, "validation": rows.select(np.arange(2))})

    monkeypatch.setattr(table_splits, "load_dataset", load_dataset)
    found = tables(hub="owner/data", config="small", revision="v2")
    assert asked == [(("owner/data", "small"), {"revision": "v2"})]
    assert (found.eval_name, len(found.evaluation)) == ("validation", 2)
    assert found.train.at(3) == "row 3 of split 'train' of owner/data"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["give dataset.path=<file or folder> or dataset.hub=<owner/name>", "neither"]),
        ({"path": ".", "hub": "a/b"}, ["both . and a/b"]),
        ({"path": ".", "config": "x"}, ["dataset.config=x", "give dataset.hub="]),
        ({"path": ".", "revision": "x"}, ["dataset.revision=x", "give dataset.hub="]),
        ({"path": ".", "delimiter": "tabs"}, ["dataset.delimiter=tabs", "tab, comma"]),
        ({"path": ".", "delimiter": ""}, ["dataset.delimiter= is no character"]),
        ({"path": ".", "eval_fraction": 0.0}, ["dataset.eval_fraction=0.0"]),
        ({"path": ".", "eval_fraction": 1.0}, ["dataset.eval_fraction=1.0"]),
        ({"path": ".", "eval_split": "train"}, ["dataset.eval_split=train would evaluate on the training data"]),
        ({"path": ".", "eval_path": "nowhere.csv"}, ["dataset.eval_path=nowhere.csv is no file"]),
        ({"path": ".", "eval_path": "a", "eval_split": "b"}, ["both given"]),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        Spec(**options).check()
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(("word", "delimiter"), [("tab", "\t"), ("\\t", "\t"), ("semicolon", ";"), ("|", "|")])
def test_delimiters_have_names(tmp_path: Path, word: str, delimiter: str) -> None:
    (tmp_path / "a.csv").write_text(f"n{delimiter}m\n" + f"1{delimiter}2\n" * 2)
    assert [*tables(path=str(tmp_path / "a.csv"), delimiter=word).train.features] == ["n", "m"]


def test_a_misspelled_split_is_answered_with_those_that_there_are(folder: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\.eval_split=vald: there is no such split; there are dev, gold, test"):
        tables(path=str(folder), eval_split="vald")

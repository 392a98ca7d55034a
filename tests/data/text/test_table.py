"""Tables of texts with labels: the task that is chosen, the classes, the targets and the loss's weights."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from support.jobs import loaded

from pipetransformer.data.base import Data, TextFormat
from pipetransformer.data.tables.labels import MOST_CLASSES, MOST_WHOLE_NUMBERS, LabelOptions, Labels
from pipetransformer.data.tables.rows import read_files
from pipetransformer.data.text.glue import Glue
from pipetransformer.data.text.split import LabelledTexts
from pipetransformer.data.text.table import TextDataset
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head


def write_lines(file: Path, labels: Sequence[Any]) -> str:
    """JSON lines with a text for each label; a mapping is further columns."""
    rows = [{"text": f"it is {'a' * (row % 3)}", "label": label} for row, label in enumerate(labels)]
    rows = [row | row["label"] if isinstance(row["label"], Mapping) else row for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_csv(file: Path, labels: Sequence[str]) -> str:
    file.write_text("text,label\n" + "".join(f'it is,"{label}"\n' for label in labels))
    return str(file)


def load(wanted: TextFormat, /, **options: Any) -> Data:
    spec = TextDataset(**options)
    spec.check()
    data = spec.load(wanted)
    if spec.path is not None:
        assert spec.preflight() == len(data.train)
    return data


def on_its_own(wanted: TextFormat, file: str, /, **options: Any) -> Data:
    """A file to train and to evaluate on."""
    return load(wanted, path=file, eval_path=file, **options)


def targets(data: Data) -> list[Any]:
    return data.train.targets(range(len(data.train))).tolist()


@pytest.mark.parametrize(
    ("labels", "task", "names", "expected"),
    [
        (["good", "bad", " good "], "classification", ("bad", "good"), [1, 0, 1]),
        ([10, 2, 10], "classification", ("2", "10"), [1, 0, 1]),
        ([True, False], "classification", ("false", "true"), [1, 0]),
        (["10", "9", "9"], "classification", ("9", "10"), [1, 0, 0]),
        ([0.5, 2, 1e-3], "regression", (), [0.5, 2.0, 1e-3]),
        ([1.0, 2.0], "regression", (), [1.0, 2.0]),
        (["0.5", "2", "-1e3"], "regression", (), [0.5, 2.0, -1000.0]),
        ([["b", "a"], [], ["b", "b"]], "multi_label_classification", ("a", "b"), [[1, 1], [0, 0], [0, 1]]),
        ([[3, 20], [3]], "multi_label_classification", ("3", "20"), [[1, 1], [1, 0]]),
        ([[1.0, 0.0], [0.0, 0.0]], "multi_label_classification", ("0", "1"), [[1, 0], [0, 0]]),
        ([[True, False], [False, False]], "multi_label_classification", ("0", "1"), [[1, 0], [0, 0]]),
        (
            [[0, 1, 0], [0, 0, 0], [1, 1, 0]],
            "multi_label_classification",
            ("0", "1", "2"),
            [[0, 1, 0], [0] * 3, [1, 1, 0]],
        ),
        ([[0, 1], [1], []], "multi_label_classification", ("0", "1"), [[1, 1], [0, 1], [0, 0]]),
        ([[0], [1]], "multi_label_classification", ("0", "1"), [[1, 0], [0, 1]]),
        ([[0, 1], [1, 2]], "multi_label_classification", ("0", "1", "2"), [[1, 1, 0], [0, 1, 1]]),
    ],
    ids=str,
)
def test_the_task_follows_from_the_labels(
    tmp_path: Path, text: TextFormat, labels: list[Any], task: str, names: tuple[str, ...], expected: list[Any]
) -> None:
    data = on_its_own(text, write_lines(tmp_path / "a.jsonl", labels))
    assert (data.task.name, data.task.head.labels, targets(data)) == (task, names, expected)
    assert data.note.startswith("label is ")
    problem = {"classification": "single_label_classification"}.get(task, task)
    assert data.task.head.problem_type == problem, "transformers' word for it"


@pytest.mark.parametrize(
    ("labels", "task", "is_told"),
    [
        ([0.0, 1.0], "auto", True),
        (["0.0", "1.0", "1.0"], "auto", True),
        ([0.0, 1.0], "regression", False),
        ([0.0, 1.0], "classification", False),
        ([0.0, 0.5], "auto", False),
        ([*map(float, range(MOST_WHOLE_NUMBERS + 1))], "auto", False),
    ],
    ids=str,
)
def test_a_regression_on_few_whole_numbers_is_told_unless_the_task_is_given(
    tmp_path: Path, text: TextFormat, labels: list[Any], task: str, is_told: bool
) -> None:
    data = on_its_own(text, write_lines(tmp_path / "a.jsonl", labels), task=task)
    assert len(data.warnings) == is_told
    for words in ("dataset.label=label has 2", "0.0, 1.0", "give dataset.task=classification"):
        assert all(words in warning for warning in data.warnings)


@pytest.mark.parametrize("labels", [["1", "2"], ["0.5", "2"], ["good", "bad"], ["true", "false"]], ids=str)
def test_a_csv_file_gives_the_task_that_json_does(tmp_path: Path, text: TextFormat, labels: list[str]) -> None:
    native = [label if label in ("good", "bad") else json.loads(label) for label in labels]
    csv = on_its_own(text, write_csv(tmp_path / "a.csv", labels))
    lines = on_its_own(text, write_lines(tmp_path / "a.jsonl", native))
    assert (csv.task.name, csv.task.head, csv.note) == (lines.task.name, lines.task.head, lines.note)
    assert targets(csv) == targets(lines)


@pytest.mark.parametrize(
    ("train", "evaluation", "expected"),
    [
        ([[0, 1], [1, 0]], [[1, 1], [0, 0]], [[1, 1], [0, 0]]),
        ([[0, 1], [1, 0]], [[1.0, 1.0], [0.0, 0.0]], [[1, 1], [0, 0]]),
        ([[0, 1], [1]], [[1, 1], [0, 0]], [[0, 1], [1, 0]]),
    ],
    ids=str,
)
def test_lists_of_evaluation_are_read_as_those_of_training(
    tmp_path: Path, text: TextFormat, train: list[Any], evaluation: list[Any], expected: list[Any]
) -> None:
    files = [write_lines(tmp_path / f"{name}.jsonl", each) for name, each in (("train", train), ("dev", evaluation))]
    data = load(text, path=files[0], eval_path=files[1])
    assert data.evaluation[0].targets([0, 1]).tolist() == expected


def test_a_number_for_each_class_may_have_names(tmp_path: Path, text: TextFormat) -> None:
    data = on_its_own(text, write_lines(tmp_path / "a.jsonl", [[0, 1, 1], [1, 0, 0]]), labels=["a", "b", "c"])
    assert (data.task.head.labels, targets(data)) == (("a", "b", "c"), [[0, 1, 1], [1, 0, 0]])


TRUTH = [
    [True, False, False],
    ["true", "false", "false"],
    ["True", "False", "False"],
    ["TRUE", "FALSE", "FALSE"],  # as R and Excel do
]


@pytest.mark.parametrize("train", TRUTH)
@pytest.mark.parametrize("evaluation", TRUTH)
def test_truth_values_may_be_written_otherwise_in_other_data(
    tmp_path: Path, text: TextFormat, train: list[Any], evaluation: list[Any]
) -> None:
    files = [write_lines(tmp_path / f"{name}.jsonl", each) for name, each in (("train", train), ("dev", evaluation))]
    data = load(text, path=files[0], eval_path=files[1])
    assert data.evaluation[0].targets([0, 1, 2]).tolist() == targets(data) == [1, 0, 0]


def test_words_for_true_that_differ_stay_classes_of_their_own(tmp_path: Path, text: TextFormat) -> None:
    data = on_its_own(text, write_csv(tmp_path / "a.csv", ["TRUE", "true", "FALSE"]))
    assert (data.task.head.labels, len(data.warnings)) == (("FALSE", "TRUE", "true"), 1)
    dev = write_csv(tmp_path / "dev.csv", ["True"])
    with pytest.raises(UserError, match="label is 'True', which is no label of the training data"):
        load(text, path=str(tmp_path / "a.csv"), eval_path=dev)


@pytest.mark.parametrize("cells", TRUTH)
def test_truth_values_of_options_are_those_of_the_data(tmp_path: Path, text: TextFormat, cells: list[Any]) -> None:
    file = write_lines(tmp_path / "a.jsonl", cells)
    named = on_its_own(text, file, labels=[True, False], class_weights={True: 2.0, False: 1.0})
    assert (named.task.head.labels, targets(named)) == (("true", "false"), [0, 1, 1])
    found = on_its_own(text, file, class_weights={False: 1.0, True: 2.0})
    assert targets(found) == [1, 0, 0]
    for data in (named, found):
        assert data.train.loss_weights is not None
        assert data.train.loss_weights.tolist() == [2.0, 1.0, 1.0]


def test_truth_values_reach_the_options_as_they_are(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [True, False])
    dataset = loaded("model=bert", "dataset=text", f"dataset.path={file}", "dataset.labels=[false,true]").dataset
    assert vars(dataset)["labels"] == [False, True]


def test_labels_with_separators_are_several_classes(tmp_path: Path, text: TextFormat) -> None:
    data = on_its_own(text, write_csv(tmp_path / "a.csv", ["b|a", "", "b | |"]), label_separator="|")
    assert (data.task.head.labels, targets(data)) == (("a", "b"), [[1, 1], [0, 0], [0, 1]])


@pytest.mark.parametrize("rude", [[1, 0], ["TRUE", "FALSE"]])
def test_a_column_for_each_class_is_several_classes(tmp_path: Path, text: TextFormat, rude: list[Any]) -> None:
    rows = [{"rude": rude[0], "spam": False}, {"rude": rude[1], "spam": True}]
    data = on_its_own(text, write_lines(tmp_path / "a.jsonl", rows), label=["rude", "spam"])
    assert (data.task.head.labels, targets(data)) == (("rude", "spam"), [[1, 0], [0, 1]])
    assert data.note == "rude, spam is any of 2 classes (rude, spam)"


def test_names_of_the_datasets_library_are_taken(tmp_path: Path, text: TextFormat) -> None:
    label = datasets.ClassLabel(names=["negative", "neutral", "positive"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label, "tags": datasets.List(label)})
    rows = {"text": ["it", "is"], "label": [2, 0], "tags": [[1], [0, 2]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "data")
    one = load(text, path=str(tmp_path / "data"), eval_fraction=0.5)
    assert one.task.head.labels == ("negative", "neutral", "positive")
    assert sorted(targets(one) + one.evaluation[0].targets([0]).tolist()) == [0, 2]
    several = load(text, path=str(tmp_path / "data"), eval_fraction=0.5, label="tags")
    assert several.task.head.labels == one.task.head.labels


def test_classes_can_be_named_in_order_and_numbers_stand_for_them(tmp_path: Path, text: TextFormat) -> None:
    by_name = on_its_own(text, write_csv(tmp_path / "a.csv", ["good", "bad"]), labels=["good", "bad", "none"])
    by_number = on_its_own(text, write_csv(tmp_path / "b.csv", ["0", "1"]), labels=["good", "bad", "none"])
    assert by_name.task.head.labels == by_number.task.head.labels == ("good", "bad", "none")
    assert targets(by_name) == targets(by_number) == [0, 1]


def test_the_classes_are_those_of_the_whole_split_whatever_is_drawn(tmp_path: Path, text: TextFormat) -> None:
    file = write_csv(tmp_path / "a.csv", [*"abcdefgh"])
    data = load(text, path=file, max_train_samples=2, eval_fraction=0.5)
    assert data.task.head.labels == tuple("abcdefgh")
    assert (len(data.train), len(data.evaluation[0])) == (2, 4)


def as_csv(folder: Path, **splits: list[str | None]) -> None:
    """The column of labels is left out where none is given."""
    for name, labels in splits.items():
        rows = [f"it is,{label}" if any(labels) else "it is" for label in labels]
        (folder / f"{name}.csv").write_text("\n".join(["text,label" if any(labels) else "text", *rows, ""]))


def as_lines(folder: Path, **splits: list[str | None]) -> None:
    for name, labels in splits.items():
        write_lines(folder / f"{name}.jsonl", labels)


def as_parquet(folder: Path, **splits: list[str | None]) -> None:
    for name, labels in splits.items():
        table = pa.table({"text": ["it is"] * len(labels), "label": pa.array(labels, pa.string())})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")


def as_saved(folder: Path, **splits: list[str | None]) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    numbers = {name: ["ab".index(label) if label else -1 for label in labels] for name, labels in splits.items()}
    rows = {name: {"text": ["it is"] * len(labels), "label": labels} for name, labels in numbers.items()}
    kept = {name: datasets.Dataset.from_dict(columns, features=features) for name, columns in rows.items()}
    datasets.DatasetDict(kept).save_to_disk(folder)


@pytest.mark.parametrize("write", [as_csv, as_lines, as_parquet, as_saved])
def test_test_data_without_labels_are_not_evaluated_on(
    tmp_path: Path, text: TextFormat, write: Callable[..., None]
) -> None:
    unlabelled: list[str | None] = [None] * 3
    write(tmp_path, train=[*"abababab"], test=unlabelled)
    data = load(text, path=str(tmp_path), eval_fraction=0.25)
    assert (len(data.train), data.evaluation[0].name, len(data.evaluation[0])) == (6, "held_out", 2)
    (told,) = data.warnings
    assert told.startswith("the split test is not evaluated on, because ")
    assert told.endswith("; a part of train (dataset.eval_fraction=0.25) is instead")
    with pytest.raises(
        UserError, match=r"dataset\.eval_split=test: .* has no.* label; .*drop the option to hold a part"
    ):
        load(text, path=str(tmp_path), eval_split="test")
    (tmp_path / "all").mkdir()
    write(tmp_path / "all", train=[*"abab"], validation=[*"ab"], test=unlabelled)
    data = load(text, path=str(tmp_path / "all"))
    assert (len(data.train), data.evaluation[0].name, data.warnings) == (4, "validation", ())


@pytest.mark.parametrize(
    ("train", "test", "is_used"),
    [
        ([0, 1, 0, 1], [-1, -1], False),
        ([-1, 1, -1, 1], [-1, -1], True),
        ([0, 1, 0, 1], [-1, 1], True),
        ([0.5, 2.0, 1.5], [-1.0], False),
        ([["a"], ["b"], ["a"]], [[], []], False),
        ([["a"], ["b"], []], [[], ["b"]], True),
        ([{"one": 0, "two": 1}] * 4, [{"one": -1, "two": -1}], False),
    ],
)
def test_less_than_nothing_is_no_label_unless_training_has_it(
    tmp_path: Path, train: list[Any], test: list[Any], is_used: bool
) -> None:
    write_lines(tmp_path / "train.jsonl", train)
    write_lines(tmp_path / "test.jsonl", test)
    label = ["one", "two"] if isinstance(train[0], dict) else "label"
    found = TextDataset(path=str(tmp_path), label=label).tables()
    assert (found.eval_name, len(found.warnings)) == (("test", 0) if is_used else ("held_out", 1))


def test_a_label_that_is_not_a_number_names_no_class(tmp_path: Path) -> None:
    labels = pa.array([0.0, 1.0, float("nan"), 1.0])
    pyarrow.parquet.write_table(pa.table({"label": labels}), tmp_path / "a.parquet")
    rows = read_files((tmp_path / "a.parquet",))
    assert Labels.of(rows, LabelOptions(("label",), "classification")).names == ("0", "1")


def test_numbers_that_are_written_in_several_ways_are_classes_in_one_order(tmp_path: Path, text: TextFormat) -> None:
    names = ("+1", "00001", "0001", "001", "01", "1", "2")
    data = on_its_own(text, write_csv(tmp_path / "a.csv", ["2", "1", "01", "001", "0001", "00001", "+1"]))
    assert (data.task.head.labels, targets(data)) == (names, [6, 5, 4, 3, 2, 1, 0])


@pytest.mark.parametrize(("kind", "most"), [("number", MOST_WHOLE_NUMBERS), ("text", MOST_CLASSES)])
def test_many_different_labels_are_not_guessed(tmp_path: Path, text: TextFormat, kind: str, most: int) -> None:
    labels = [str(each) if kind == "number" else f"class {each}" for each in range(most + 1)]
    on_its_own(text, write_csv(tmp_path / "few.csv", labels[:most]))
    file = write_csv(tmp_path / "many.csv", labels)
    with pytest.raises(UserError, match=rf"{most + 1} different .* give .*dataset\.task=classification"):
        on_its_own(text, file)
    assert on_its_own(text, file, task="classification").task.head.num_outputs == most + 1
    if kind == "number":
        assert on_its_own(text, file, task="regression").task.name == "regression"


def test_a_text_to_predict_is_named_by_its_line_and_blank_lines_count(tmp_path: Path, text: TextFormat) -> None:
    (tmp_path / "in.txt").write_text("\nit is\n \nof it\n\n")
    (tmp_path / "in.csv").write_text("text\nit is\nof it\n")
    for spec in (TextDataset(path="away"), Glue(task="sst2")):
        found = spec.unlabelled(tmp_path / "in.txt", text, Head("sequence", 2, ("a", "b"))).split
        assert [row["row"] for row in found.rows(np.array([[0.1, 0.9], [0.9, 0.1]]))] == [1, 3]
    found = TextDataset(path="away").unlabelled(tmp_path / "in.csv", text, Head("sequence", 2, ("a", "b"))).split
    assert [row["row"] for row in found.rows(np.array([[0.1, 0.9], [0.9, 0.1]]))] == [0, 1]


def test_texts_and_pairs_are_tokenised_in_their_order_over_many_batches(tmp_path: Path, text: TextFormat) -> None:
    rows = [{"text": f"it {row}", "other": f"of {row}", "label": row % 2} for row in range(2005)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = on_its_own(text, str(tmp_path / "a.jsonl"), text=["text", "other"])
    decoded = [text.tokenizer.decode(data.train.inputs([row], None)[0]) for row in (0, 999, 1000, 2004)]
    assert decoded == [f"[CLS] it {row} [SEP] of {row} [SEP]" for row in (0, 999, 1000, 2004)]
    assert targets(data)[-2:] == [1, 0]


def test_texts_are_never_whole_in_memory(tmp_path: Path, text: TextFormat) -> None:
    file, longest = write_csv(tmp_path / "a.csv", [str(row % 2) for row in range(2500)]), 0

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(text.tokenizer, name)

        def __call__(self, texts: list[str], **options: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(texts))
            return text.tokenizer(texts, **options)

    on_its_own(TextFormat(Watched(), 16), file)
    assert longest == 1000


def test_a_text_is_cut_at_the_shorter_limit(tmp_path: Path, text: TextFormat) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + "it is " * 90 + ",1\n" + "of " * 90 + ",0\n")
    data = on_its_own(text, str(tmp_path / "a.csv"), max_length=12)
    assert data.train.inputs([0, 1], None).shape == (2, 12)
    assert on_its_own(TextFormat(text.tokenizer, 9), str(tmp_path / "a.csv")).train.inputs([0], None).shape == (1, 9)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("balanced", [4 / (2 * 3), 4 / (2 * 1)]),  # a three times, b once
        ([1, 2.5], [1.0, 2.5]),
        ({"b": 3, "a": 0.5}, [0.5, 3.0]),
    ],
    ids=str,
)
def test_class_weights_weigh_the_loss_and_divide_it(
    tmp_path: Path, text: TextFormat, given: Any, expected: list[float]
) -> None:
    data = on_its_own(text, write_csv(tmp_path / "a.csv", [*"aaba"]), class_weights=given, label_smoothing=0.1)
    classes, weight = torch.tensor([0, 0, 1, 0]), torch.tensor(expected, dtype=torch.float64)
    assert data.train.loss_weights is not None
    np.testing.assert_allclose(data.train.loss_weights, weight[classes])
    output = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = data.task.loss(output, data.train.targets(range(4)).double()).sum() / data.train.loss_weights.sum()
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(output, classes, weight, label_smoothing=0.1), rtol=0, atol=1e-12
    )


def test_balanced_weights_are_scikit_learns(tmp_path: Path, text: TextFormat) -> None:
    from sklearn.utils.class_weight import compute_sample_weight

    labels = [*"abcacca"]
    data = on_its_own(text, write_csv(tmp_path / "a.csv", labels), class_weights="balanced")
    np.testing.assert_allclose(data.train.loss_weights, compute_sample_weight("balanced", labels))


def test_without_weights_the_loss_is_a_mean(tmp_path: Path, text: TextFormat) -> None:
    assert on_its_own(text, write_csv(tmp_path / "a.csv", [*"aab"])).train.loss_weights is None


@pytest.mark.parametrize(
    ("labels", "metrics"),
    [
        ([1, 2], ("accuracy", "macro_f1")),
        ([0.5, 1.5], ("pearson", "spearman", "mse", "mae")),
        ([["a"], ["b"]], ("micro_f1", "macro_f1", "subset_accuracy")),
    ],
    ids=str,
)
def test_a_right_prediction_is_scored_by_the_metrics_of_its_task(
    tmp_path: Path, text: TextFormat, labels: list[Any], metrics: tuple[str, ...]
) -> None:
    data = on_its_own(text, write_lines(tmp_path / "a.jsonl", labels))
    (split,) = data.evaluation
    assert isinstance(split, LabelledTexts)
    found = split.score(split.labels)
    assert tuple(found) == metrics
    assert found == pytest.approx({name: 0.0 if name in ("mse", "mae") else 1.0 for name in metrics})


def test_metrics_can_be_chosen(tmp_path: Path, text: TextFormat) -> None:
    data = on_its_own(text, write_csv(tmp_path / "a.csv", [*"ab"]), metrics=["matthews", "accuracy"])
    assert data.evaluation[0].score(np.array([0, 1])) == {"matthews": 1.0, "accuracy": 1.0}


def test_predictions_stand_beside_their_targets(tmp_path: Path, text: TextFormat) -> None:
    data = on_its_own(text, write_lines(tmp_path / "a.jsonl", [["a"], ["a", "b"]]))
    rows = [*data.evaluation[0].rows(np.array([[1, 0], [0, 0]]))]
    assert rows[1] == {"id": 1, "prediction": [0, 0], "target": [1, 1]}


def test_the_real_sst2_is_loaded_from_its_folder(shared_data: Path, text: TextFormat) -> None:
    data = load(text, path=str(shared_data / "sst2"), text="sentence", eval_split="test", max_train_samples=1000)
    assert (data.evaluation[0].name, len(data.evaluation[0]), len(data.train)) == ("test", 872, 1000)
    assert data.task.head.labels == ("0", "1")
    ones = np.ones(872, dtype=np.int64)
    assert data.evaluation[0].score(ones)["accuracy"] == pytest.approx(444 / 872)


@pytest.mark.parametrize(("labels", "second"), [(None, "spam"), (["spam", "ham"], "ham")])
def test_the_class_that_f1_is_of_is_told(
    tmp_path: Path, text: TextFormat, labels: list[str | int | float | bool] | None, second: str
) -> None:
    data = on_its_own(text, write_csv(tmp_path / "a.csv", ["spam", "ham"]), metrics=["f1"], labels=labels)
    assert data.note.endswith(f"; f1 is that of the class {second}, the second (dataset.labels= names them in order)")
    targets = data.train.targets([0, 1]).numpy()
    is_second = np.array([1, 0]) if second == "spam" else np.array([0, 1])
    assert (targets == is_second).all()
    assert data.train.score(np.array([1, 1])) == {"f1": pytest.approx(2 / 3)}


def test_f1_of_three_classes_is_refused_with_what_to_take(tmp_path: Path, text: TextFormat) -> None:
    file = write_csv(tmp_path / "a.csv", [*"abc"])
    with pytest.raises(ValueError, match="f1 is for two classes, and the data has 3; take macro_f1 or micro_f1"):
        on_its_own(text, file, metrics=["accuracy", "f1"])


def test_the_lines_of_a_text_file_are_predicted(tmp_path: Path, text: TextFormat) -> None:
    (tmp_path / "new.txt").write_text("one line\nanother\n")
    spec = TextDataset(path=write_csv(tmp_path / "a.csv", [*"ab"]))
    assert len(spec.unlabelled(tmp_path / "new.txt", text, Head("sequence", 2, ("a", "b"))).split) == 2

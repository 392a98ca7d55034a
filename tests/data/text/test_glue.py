import copy
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from pipetransformer.data.base import TextFormat
from pipetransformer.data.text import glue
from pipetransformer.data.text.glue import TASKS, Glue
from pipetransformer.data.text.split import LabelledTexts

SST2 = "sentence\tlabel\nit is\t1\nof a\t0\na\t1\n"


def write(folder: Path, **files: str) -> str:
    for name, content in files.items():
        (folder / f"{name}.tsv").write_text(content)
    return str(folder)


def test_a_folder_of_tables_is_loaded(tmp_path: Path, text: TextFormat) -> None:
    spec = Glue(task="sst2", path=write(tmp_path, train=SST2, dev=SST2))
    spec.check()
    data = spec.load(text)
    assert (data.task.name, data.task.head.num_outputs, data.task.head.labels) == (
        "classification",
        2,
        ("negative", "positive"),
    )
    assert (data.random_transform, data.input_shape) == (False, ())
    assert data.train.targets([0, 1]).tolist() == [1, 0]
    assert text.tokenizer.decode(data.train.inputs([1], None)[0]) == "[CLS] of a [SEP]"
    assert [split.name for split in data.evaluation] == ["dev"]


@pytest.mark.parametrize(
    ("test", "eval_split", "used"),
    [
        (SST2, None, "test"),
        (SST2, "dev", "dev"),
        ("sentence\nit is\n", None, "dev"),
        ("sentence\tlabel\nit is\t-1\n", None, "dev"),
    ],
)
def test_the_test_table_is_used_where_it_has_labels(
    tmp_path: Path, text: TextFormat, test: str, eval_split: str | None, used: str
) -> None:
    path = write(tmp_path, train=SST2, dev=SST2, test=test)
    data = Glue(task="sst2", path=path, eval_split=eval_split).load(text)
    assert [split.name for split in data.evaluation] == [used]


def test_published_column_names_and_class_names_are_understood(tmp_path: Path, text: TextFormat) -> None:
    table = "index\tsentence1\tsentence2\tgold_label\n0\tit is\ta\tneutral\n1\ta\tof\tcontradiction\n"
    path = write(tmp_path, train=table, dev_matched=table, dev_mismatched=table)
    data = Glue(task="mnli", path=path).load(text)
    assert [split.name for split in data.evaluation] == ["dev_matched", "dev_mismatched"]
    assert data.train.targets([0, 1]).tolist() == [1, 2]
    assert text.tokenizer.decode(data.train.inputs([0], None)[0]) == "[CLS] it is [SEP] a [SEP]"


def test_similarities_are_values(tmp_path: Path, text: TextFormat) -> None:
    table = "sentence1\tsentence2\tscore\nit\tis\t0.0\na\tof\t2.5\nit\tit\t5.0\n"
    data = Glue(task="stsb", path=write(tmp_path, train=table, dev=table)).load(text)
    (split,) = data.evaluation
    assert (data.task.name, data.task.head.num_outputs, data.task.head.labels) == ("regression", 1, ())
    assert split.targets([1]).dtype == torch.float64
    outputs = torch.tensor([[0.1], [0.2], [0.4]], dtype=torch.float64)
    predictions = split.predict(outputs, [0, 1, 2], None)
    assert predictions.tolist() == [0.1, 0.2, 0.4]
    scores = split.score(predictions.numpy())
    pearson = np.corrcoef([0.1, 0.2, 0.4], [0, 2.5, 5])[0, 1]
    assert scores == pytest.approx({"pearson": pearson, "spearman": 1.0}, abs=1e-5)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "stsb"])
def test_every_task_scores_a_perfect_prediction_with_one(tmp_path: Path, text: TextFormat, task: str) -> None:
    columns = TASKS[task].columns
    rows = ["\t".join([*("it is" for _ in columns), str(label % len(TASKS[task].labels))]) for label in range(6)]
    table = "\n".join(["\t".join([*columns, "label"]), *rows])
    data = Glue(task=task, path=write(tmp_path, train=table, dev=table)).load(text)
    (split,) = data.evaluation
    assert isinstance(split, LabelledTexts)
    assert split.score(split.labels) == pytest.approx(dict.fromkeys(TASKS[task].metrics, 1.0))
    assert split.score((split.labels + 1) % 2)[TASKS[task].metrics[0]] < 0.5


@pytest.mark.parametrize(("own", "model", "length"), [(10, 512, 10), (128, 12, 12)])
def test_the_shorter_limit_cuts(tmp_path: Path, text: TextFormat, own: int, model: int, length: int) -> None:
    table = "sentence\tlabel\n" + "it is " * 50 + "\t1\n"
    spec = Glue(task="sst2", path=write(tmp_path, train=table, dev=table), max_length=own)
    data = spec.load(TextFormat(tokenizer=text.tokenizer, max_length=model))
    assert data.train.inputs([0], None).shape == (1, length)


def test_limits_keep_texts_with_their_labels(tmp_path: Path, text: TextFormat) -> None:
    table = "sentence\tlabel\n" + "".join(f"{'it is' if row % 2 else 'of a'}\t{row % 2}\n" for row in range(30))
    spec = Glue(task="sst2", path=write(tmp_path, train=table, dev=table), max_train_samples=11, max_eval_samples=3)
    data = spec.load(text)
    assert (len(data.train), len(data.evaluation[0])) == (11, 3)
    texts = [text.tokenizer.decode(ids, skip_special_tokens=True) for ids in data.train.inputs(range(11), None)]
    assert [int(each == "it is") for each in texts] == data.train.targets(range(11)).tolist()


@pytest.mark.parametrize(
    ("task", "table", "message"),
    [
        (
            "sst2",
            "sentence\tlabel\nit\t2\nis\tgood\n",
            r"train\.tsv line 2 has the label '2', and 2 labels of 2 are wrong",
        ),
        ("sst2", "text\tlabel\nit\t1\n", "columns text, label; the task needs sentence"),
        ("qqp", "text\tlabel\nit\t1\n", "needs question1 and question2 or sentence1 and sentence2"),
        ("sst2", "sentence\tclass\nit\t1\n", "name the one with the labels 'label'"),
        ("sst2", "sentence\tlabel\n", r"train\.tsv has no texts; check dataset\.path"),
        ("stsb", "sentence1\tsentence2\tlabel\nit\tis\thigh\n", r"train\.tsv line 2 has the label 'high'"),
        (
            "stsb",
            "sentence1\tsentence2\tlabel\nit\tis\tnan\n",
            "has the label 'nan', and 1 labels of 1 are wrong; give numbers from 0 to 5",
        ),
        ("stsb", "sentence1\tsentence2\tlabel\nit\tis\t-1.0\n", r"has the label '-1\.0'"),
    ],
)
def test_tables_that_do_not_serve_are_refused(
    tmp_path: Path, text: TextFormat, task: str, table: str, message: str
) -> None:
    dev = SST2 if task == "sst2" else "sentence1\tsentence2\tlabel\nit\tis\t1\n"
    with pytest.raises(ValueError, match=message):
        Glue(task=task, path=write(tmp_path, train=table, dev=dev)).load(text)


def test_a_folder_without_anything_to_evaluate_on_is_refused_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, train=SST2)
    with pytest.raises(ValueError, match=r"has no test\.tsv or dev\.tsv to evaluate on"):
        Glue(task="sst2", path=path).check()
    with pytest.raises(ValueError, match=r"has no mine\.tsv to evaluate on"):
        Glue(task="sst2", path=path, eval_split="mine").check()
    write(tmp_path, dev_matched=SST2)
    with pytest.raises(ValueError, match=r"or dev_matched\.tsv and dev_mismatched\.tsv to evaluate on"):
        Glue(task="mnli", path=path).check()


def test_a_folder_whose_evaluation_data_has_no_labels_is_refused(tmp_path: Path, text: TextFormat) -> None:
    path = write(tmp_path, train=SST2, test="sentence\nit is\n")
    with pytest.raises(ValueError, match=r"nothing with labels to evaluate on \(tried test\.tsv, dev\.tsv\)"):
        Glue(task="sst2", path=path).load(text)


@pytest.mark.parametrize(("limit", "count"), [(None, 3), (2, 2), (9, 3)])
def test_the_launcher_counts_the_training_samples(tmp_path: Path, text: TextFormat, limit: int, count: int) -> None:
    spec = Glue(task="sst2", path=write(tmp_path, train=SST2, dev=SST2), max_train_samples=limit)
    assert spec.preflight() == len(spec.load(text).train) == count


@pytest.mark.parametrize("broken", ["train", "dev"])
def test_the_launcher_refuses_tables_that_cannot_be_used(tmp_path: Path, broken: str) -> None:
    tables = {"train": SST2, "dev": SST2} | {broken: "sentence\tlabel\nit is\t2\n"}
    with pytest.raises(ValueError, match=rf"{broken}\.tsv line 2 has the label '2'"):
        Glue(task="sst2", path=write(tmp_path, **tables)).preflight()


def test_a_text_without_tokens_is_named(tmp_path: Path, text: TextFormat) -> None:
    tokenizer = copy.deepcopy(text.tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    path = write(tmp_path, train="sentence\tlabel\nit is\t1\n \t0\n", dev=SST2)
    with pytest.raises(ValueError, match=r"1 texts have no tokens, the first is .*train\.tsv line 3"):
        Glue(task="sst2", path=path).load(TextFormat(tokenizer, 512))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "sst3"}, r"dataset\.task=sst3 is not a GLUE task; choose one of cola, sst2,"),
        ({"task": "sst2", "max_length": 7}, r"dataset\.max_length=7 is too short"),
        ({"task": "sst2", "eval_split": "train"}, "would evaluate on the training data"),
        ({"task": "sst2", "path": "/"}, r"dataset\.path=/ has no train\.tsv"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Glue(**options).check()  # pyright: ignore[reportArgumentType]


def test_the_hub_is_asked_for_the_splits_with_labels(text: TextFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_hub(name: str, split: str, local: str, config: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"premise": ["it"], "hypothesis": ["is"], "label": [2], "idx": [0]})

    monkeypatch.setattr(glue, "load_hub", load_hub)
    data = Glue(task="mnli").load(text)
    names = ["train", "validation_matched", "validation_mismatched"]
    assert asked == [("nyu-mll/glue", "mnli", name) for name in names]
    assert [split.name for split in data.evaluation] == names[1:]
    assert data.train.targets([0]).tolist() == [2]


def test_the_real_sst2_is_loaded(shared_data: Path, text: TextFormat) -> None:
    data = Glue(task="sst2", path=str(shared_data / "sst2"), max_train_samples=1000).load(text)
    (test,) = data.evaluation
    assert (test.name, len(test), len(data.train)) == ("test", 872, 1000)
    assert test.score(np.ones(872, dtype=np.int64)) == pytest.approx({"accuracy": 444 / 872})

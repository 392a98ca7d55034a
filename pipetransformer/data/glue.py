"""The GLUE benchmark (Wang et al., 2018; arXiv 1804.07461) from the hub or from tab-separated files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pipetransformer.data.base import CLASSIFICATION, REGRESSION, Data, DatasetSpec, ImageFormat, TextFormat
from pipetransformer.data.hub import load_hub
from pipetransformer.data.metrics import compute
from pipetransformer.data.subset import choose
from pipetransformer.data.text import MIN_LENGTH, TextSplit, Tokens, encode
from pipetransformer.data.tsv import Table, read_tsv

if TYPE_CHECKING:
    from torch import Tensor

HUB_NAME = "nyu-mll/glue"
PAIR = ("sentence1", "sentence2")
LABEL_COLUMNS = (
    "label",
    "gold_label",
    "is_duplicate",
    "score",
)  # the first is the hub's, the others the published files'
NO_LABEL = ("-1", "")
MAX_SIMILARITY = 5
EVALUATION_FILES = (("test",), ("dev",), ("dev_matched", "dev_mismatched"))
TSV_FOLDER = "a folder with train.tsv, dev.tsv and perhaps test.tsv, each with a header row"


@dataclass(frozen=True)
class GlueTask:
    """What differs between the tasks.

    Attributes:
        columns: Columns of the one or two texts on the hub.
        labels: Names of the classes in order; none for regression.
        metrics: Names of the metrics, the main one first.
        hub_splits: The hub's splits with labels to evaluate on.
    """

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    hub_splits: tuple[str, ...] = ("validation",)


TASKS = {
    "cola": GlueTask(("sentence",), ("unacceptable", "acceptable"), ("matthews",)),
    "sst2": GlueTask(("sentence",), ("negative", "positive")),
    "mrpc": GlueTask(PAIR, ("not_equivalent", "equivalent"), ("accuracy", "f1")),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
    "stsb": GlueTask(PAIR, (), ("pearson", "spearman")),
    "mnli": GlueTask(
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        hub_splits=("validation_matched", "validation_mismatched"),
    ),
    "qnli": GlueTask(("question", "sentence"), ("entailment", "not_entailment")),
    "rte": GlueTask(PAIR, ("entailment", "not_entailment")),
    "wnli": GlueTask(PAIR, ("not_entailment", "entailment")),
}


class GlueSplit(TextSplit):
    """Texts with classes (int64) or values (float32)."""

    def __init__(self, name: str, tokens: Tokens, labels: np.ndarray, task: GlueTask) -> None:
        super().__init__(name, tokens)
        self.labels = labels
        self.task = task

    def targets(self, ids: Sequence[int]) -> Tensor:
        import torch

        return torch.from_numpy(self.labels[np.asarray(ids)])

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        return super().predict(outputs, ids, num_tokens) if self.task.labels else outputs.squeeze(1)

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        return compute(self.task.metrics, predictions, self.labels, len(self.task.labels))


@dataclass(frozen=True, kw_only=True)
class Glue(DatasetSpec):
    """One task of GLUE.

    Evaluation is on the hub's validation data, or of a local folder on ``test.tsv`` where that has labels, else on
    ``dev.tsv`` (MNLI: ``dev_matched.tsv`` and ``dev_mismatched.tsv``).

    Attributes:
        task: One of :data:`TASKS`.
        max_length: Tokens of a sample at most, special tokens included.
        eval_split: Evaluate on this split instead, for example ``dev`` while tuning.
    """

    task: str
    max_length: int = 128
    eval_split: str | None = None

    modality: ClassVar[str] = "text"

    @property
    def _published(self) -> str:
        return self.task

    def check(self) -> None:
        super().check()
        if self.task not in TASKS:
            raise ValueError(f"dataset.task={self.task} is not a GLUE task; choose one of {', '.join(TASKS)}")
        if self.max_length < MIN_LENGTH:
            raise ValueError(f"dataset.max_length={self.max_length} is too short for a text; give {MIN_LENGTH} or more")
        if self.eval_split == "train":
            raise ValueError("dataset.eval_split=train would evaluate on the training data; name another split")
        if self.path is not None and not (Path(self.path) / "train.tsv").is_file():
            raise ValueError(f"dataset.path={self.path} has no train.tsv; give {TSV_FOLDER}")

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, TextFormat)
        task = TASKS[self.task]
        train, evaluation = self._local() if self.path is not None else self._hub()
        return Data(
            train=self._split("train", train, wanted, self.max_train_samples),
            evaluation=tuple(self._split(*named, wanted, self.max_eval_samples) for named in evaluation.items()),
            task=CLASSIFICATION if task.labels else REGRESSION,
            num_outputs=len(task.labels) or 1,
            labels=task.labels,
        )

    def _hub(self) -> tuple[Table, dict[str, Table]]:
        names = TASKS[self.task].hub_splits if self.eval_split is None else (self.eval_split,)
        return self._hub_table("train"), {name: self._hub_table(name) for name in names}

    def _hub_table(self, split: str) -> Table:
        rows = load_hub(HUB_NAME, split, TSV_FOLDER, config=self.task)
        return {column: rows[column][:] for column in rows.column_names}

    def _local(self) -> tuple[Table, dict[str, Table]]:
        assert self.path is not None
        folder = Path(self.path)
        candidates = EVALUATION_FILES if self.eval_split is None else ((self.eval_split,),)
        for names in candidates:
            tables = {name: read_tsv(folder / f"{name}.tsv") for name in names if (folder / f"{name}.tsv").is_file()}
            if len(tables) == len(names) and all(map(_has_labels, tables.values())):
                return read_tsv(folder / "train.tsv"), tables
        tried = ", ".join(f"{name}.tsv" for names in candidates for name in names)
        raise ValueError(
            f"dataset.path={folder} has nothing with labels to evaluate on (tried {tried}); give {TSV_FOLDER}"
        )

    def _split(self, name: str, table: Table, wanted: TextFormat, at_most: int | None) -> GlueSplit:
        task = TASKS[self.task]
        labels = _labels(name, table, task)
        chosen = choose(len(labels), at_most)
        texts = tuple([str(table[column][row]) for row in chosen] for column in _text_columns(name, table, task))
        tokens = encode(texts, wanted.tokenizer, min(self.max_length, wanted.max_length))
        return GlueSplit(name, tokens, labels[chosen], task)


def _label_column(table: Table) -> str | None:
    return next((column for column in LABEL_COLUMNS if column in table), None)


def _has_labels(table: Table) -> bool:
    column = _label_column(table)
    return column is not None and any(str(label) not in NO_LABEL for label in table[column])


def _text_columns(name: str, table: Table, task: GlueTask) -> tuple[str, ...]:
    """The hub's names, or those of the published files, which for MNLI are other ones."""
    alternatives = [task.columns] + ([PAIR] if len(task.columns) == 2 else [])
    columns = next((columns for columns in alternatives if {*columns} <= {*table}), None)
    if columns is None:
        wanted = " or ".join(" and ".join(columns) for columns in dict.fromkeys(alternatives))
        raise ValueError(f"the {name} split has the columns {', '.join(table)}; the task needs {wanted}")
    return columns


def _labels(name: str, table: Table, task: GlueTask) -> np.ndarray:
    """Classes (N,) of int64, or values (N,) of float32."""
    column = _label_column(table)
    if column is None:
        raise ValueError(f"the {name} split has the columns {', '.join(table)}; name the one with the labels 'label'")
    texts = [str(label) for label in table[column]]
    if not task.labels:
        return _values(name, texts)
    known = {text: label for label, each in enumerate(task.labels) for text in (str(label), each)}
    wrong = [(row, text) for row, text in enumerate(texts) if text not in known]
    if wrong:
        raise ValueError(
            f"{len(wrong)} labels of the {name} split are wrong, the first is {wrong[0][1]!r} in row {wrong[0][0]}; "
            f"give 0 to {len(task.labels) - 1} or {', '.join(task.labels)}"
        )
    return np.array([known[text] for text in texts], dtype=np.int64)


def _values(name: str, texts: list[str]) -> np.ndarray:
    """Similarities (N,) of float32."""
    try:
        values = np.array([float(text) for text in texts], dtype=np.float32)
    except ValueError as error:
        raise ValueError(f"the {name} split has a label that is not a number: {error}") from error
    wrong = values[~((values >= 0) & (values <= MAX_SIMILARITY))]
    if len(wrong):
        raise ValueError(
            f"{len(wrong)} labels of the {name} split lie outside 0..{MAX_SIMILARITY}, the first is {wrong[0]}; "
            "correct them, or evaluate on a split with labels by dataset.eval_split="
        )
    return values

"""The GLUE benchmark (Wang et al., 2018; arXiv 1804.07461) from the hub or from tab-separated files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipetransformer.data.base import Data, DatasetSpec, ImageFormat, TextFormat, subsample
from pipetransformer.data.hub import find_on_hub, load_hub
from pipetransformer.data.tables.published import Table, class_labels, number_labels, read_tsv, text_columns
from pipetransformer.data.tasks import Task, regression, text_classification
from pipetransformer.data.text.kept import kept
from pipetransformer.data.text.split import MIN_LENGTH, LabelledTexts, beyond_the_model, check_tokens, cut_off, encode
from pipetransformer.data.unlabelled import ScoredSplit, Unlabelled, read_table, row_names
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head

HUB_NAME = "nyu-mll/glue"
PAIR = ("sentence1", "sentence2")
MAX_SIMILARITY = 5
TSV_FOLDER = "a folder with train.tsv, dev.tsv and perhaps test.tsv, each with a header row"


@dataclass(frozen=True)
class GlueTask:
    """Columns, labels and metrics of one of the benchmark's tasks.

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

    @property
    def task(self) -> Task:
        """The objective: classes where the task has names for them, else a value."""
        return text_classification(len(self.labels), self.labels, self.metrics) if self.labels else regression()

    def read(self, table: Table) -> tuple[tuple[list[str], ...], np.ndarray]:
        """Returns the one or two texts of each row, and the labels, (N,) of int64 or float64.

        Raises:
            UserError: There are no rows, a column is missing, or some texts or labels are wrong.
        """
        if len(table) == 0:
            raise UserError(f"{table.name} has no texts; check dataset.path")
        labels = class_labels(table, self.labels) if self.labels else number_labels(table, MAX_SIMILARITY)
        return text_columns(table, self.text_columns), labels

    @property
    def text_columns(self) -> list[tuple[str, ...]]:
        """Columns of the texts by falling preference: the hub's names, and those of published files of pairs."""
        return [self.columns] + ([PAIR] if len(self.columns) == 2 else [])


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
            raise UserError(f"dataset.task={self.task} is not a GLUE task; choose one of {', '.join(TASKS)}")
        if self.max_length < MIN_LENGTH:
            raise UserError(f"dataset.max_length={self.max_length} is too short for a text; give {MIN_LENGTH} or more")
        if self.eval_split == "train":
            raise UserError("dataset.eval_split=train would evaluate on the training data; name another split")
        if self.path is not None:
            self._check_files(Path(self.path))

    def _check_files(self, folder: Path) -> None:
        if not _file(folder, "train").is_file():
            raise UserError(f"dataset.path={self.path} has no train.tsv; give {TSV_FOLDER}")
        if not any(all(_file(folder, name).is_file() for name in names) for names in self._eval_files):
            files = " or ".join(" and ".join(f"{name}.tsv" for name in names) for names in self._eval_files)
            raise UserError(f"dataset.path={self.path} has no {files} to evaluate on; give {TSV_FOLDER}")

    @property
    def _eval_files(self) -> tuple[tuple[str, ...], ...]:
        """The tables to evaluate on, by falling preference."""
        if self.eval_split is not None:
            return ((self.eval_split,),)
        names = (("test",), ("dev",))
        return (*names, ("dev_matched", "dev_mismatched")) if self.task == "mnli" else names

    def preflight(self) -> int | None:
        if self.path is None:
            find_on_hub(HUB_NAME, TSV_FOLDER, self.task)
            return None
        train, evaluation = self._local()
        for table in (train, *evaluation.values()):
            TASKS[self.task].read(table)
        return self._num_train(len(train))

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, TextFormat)
        train, evaluation = self._local() if self.path is not None else self._hub()
        first = self._split("train", train, wanted, self.max_train_samples)
        others = tuple(self._split(*named, wanted, self.max_eval_samples) for named in evaluation.items())
        cut = (text for split in (first, *others) for text in cut_off(split, self.max_length, wanted))
        warnings = *beyond_the_model(self.max_length, wanted), *cut
        return Data(first, others, TASKS[self.task].task, warnings=warnings)

    def unlabelled(self, source: Path, wanted: ImageFormat | TextFormat, head: Head) -> Unlabelled:
        assert isinstance(wanted, TextFormat)
        kind = TASKS[self.task]
        table = read_table(source, kind.columns[0] if len(kind.columns) == 1 else None)
        texts = text_columns(table, kind.text_columns)
        tokens = encode(texts, wanted.tokenizer, min(self.max_length, wanted.max_length))
        check_tokens(tokens, wanted, table.at)
        split = LabelledTexts("input", tokens, np.zeros(len(table), dtype=np.int64), kind.task)
        return Unlabelled(ScoredSplit(split, row_names(source, len(table)), kind.labels), kind.task)

    def _hub(self) -> tuple[Table, dict[str, Table]]:
        names = TASKS[self.task].hub_splits if self.eval_split is None else (self.eval_split,)
        return self._hub_table("train"), {name: self._hub_table(name) for name in names}

    def _hub_table(self, split: str) -> Table:
        rows = load_hub(HUB_NAME, split, TSV_FOLDER, config=self.task)
        return Table(f"split {split!r} of {HUB_NAME}", {column: rows[column][:] for column in rows.column_names})

    def _local(self) -> tuple[Table, dict[str, Table]]:
        assert self.path is not None
        folder = Path(self.path)
        for names in self._eval_files:
            tables = {name: read_tsv(_file(folder, name)) for name in names if _file(folder, name).is_file()}
            if len(tables) == len(names) and all(table.has_labels for table in tables.values()):
                return read_tsv(_file(folder, "train")), tables
        tried = ", ".join(f"{name}.tsv" for names in self._eval_files for name in names)
        raise UserError(
            f"dataset.path={folder} has nothing with labels to evaluate on (tried {tried}); give {TSV_FOLDER}"
        )

    def _split(self, name: str, table: Table, wanted: TextFormat, at_most: int | None) -> LabelledTexts:
        texts, labels = TASKS[self.task].read(table)
        rows = subsample(len(labels), at_most)
        chosen = tuple([column[row] for row in rows] for column in texts)
        tokens = kept(encode, lambda: chosen, wanted.tokenizer, min(self.max_length, wanted.max_length))
        check_tokens(tokens, wanted, lambda sample: table.at(int(rows[sample])))
        return LabelledTexts(name, tokens, labels[rows], TASKS[self.task].task)


def _file(folder: Path, split: str) -> Path:
    return folder / f"{split}.tsv"

"""Options of every dataset that is a table: where it lies, and which rows train and which evaluate."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pipetransformer.data.base import SPLIT_SEED, DatasetSpec, subsample
from pipetransformer.data.hub import find_on_hub
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.data.tables.files import Formats
    from pipetransformer.data.tables.rows import Rows
    from pipetransformer.data.tables.splits import Splits

EVAL_SPLITS = ("validation", "valid", "val", "dev", "test")  # by falling preference
HELD_OUT, TRAIN, TEST = "held_out", "train", "test"
LOCAL_TABLES = (
    "a .csv, .tsv, .jsonl, .json, .parquet or .arrow file, a folder of them named train and validation or test"
)
DELIMITERS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}


@dataclass(frozen=True)
class Tables:
    """The rows of a run.

    Attributes:
        train: The rows to train on, at most ``max_train_samples``.
        evaluation: The rows to evaluate on, at most ``max_eval_samples``.
        eval_name: The name of their split.
        known: All rows of the training split, in which classes are looked for: so that neither a limit nor the draw of
            held-out rows changes the classes.
        warnings: Splits that could have been evaluated on and are not, and why.
    """

    train: Rows
    evaluation: Rows
    eval_name: str
    known: Rows
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TableSpec(DatasetSpec, ABC):
    """A dataset in a local table, ``path``, or on the hub, ``hub``.

    Local files are converted once, into Arrow files in the cache of the ``datasets`` library, and read from there.

    Attributes:
        hub: Data set of the hub, ``owner/name``.
        config: Its configuration.
        revision: Its branch, tag or commit.
        delimiter: Character between the cells of a delimited file, or one of :data:`DELIMITERS`; ``None``: a comma in
            ``.csv``, a tab in ``.tsv``.
        train_split: The split to train on.
        eval_split: The split to evaluate on; ``None``: the first of :data:`EVAL_SPLITS` that there is, else a part of
            the training split. A split :data:`TEST` without labels counts as none.
        eval_path: File to evaluate on instead.
        eval_fraction: Fraction of the training split to hold out where there is no split to evaluate on. Its rows are
            drawn with a fixed seed.
    """

    hub: str | None = None
    config: str | None = None
    revision: str | None = None
    delimiter: str | None = None
    train_split: str = "train"
    eval_split: str | None = None
    eval_path: str | None = None
    eval_fraction: float = 0.1

    libraries: ClassVar[tuple[str, ...]] = ("datasets",)

    @property
    def _published(self) -> str:
        return self.hub or "table"

    def check(self) -> None:
        super().check()
        if (self.path is None) == (self.hub is None):
            found = "neither is given" if self.path is None else f"both {self.path} and {self.hub} are given"
            raise UserError(f"give dataset.path=<file or folder> or dataset.hub=<owner/name>: {found}")
        for option in ("config", "revision"):
            if self.hub is None and getattr(self, option) is not None:
                raise UserError(f"dataset.{option}={getattr(self, option)} is of the hub; give dataset.hub= or drop it")
        if self.delimiter is not None and len(self._delimiter or "") != 1:
            words = ", ".join(word for word in DELIMITERS if word.isalpha())
            raise UserError(f"dataset.delimiter={self.delimiter} is no character; give one, or one of {words}")
        if not 0 < self.eval_fraction < 1:
            raise UserError(f"dataset.eval_fraction={self.eval_fraction} must lie between 0 and 1")
        if self.eval_split == self.train_split:
            raise UserError(f"dataset.eval_split={self.eval_split} would evaluate on the training data; name another")
        self._check_eval_path()

    def _check_eval_path(self) -> None:
        if self.eval_path is None:
            return
        if self.eval_split is not None:
            raise UserError(f"dataset.eval_path={self.eval_path} and dataset.eval_split= are both given; drop one")
        if not Path(self.eval_path).is_file():
            raise UserError(f"dataset.eval_path={self.eval_path} is no file; give the table to evaluate on")

    @property
    def formats(self) -> Formats:
        """The files that it reads."""
        from pipetransformer.data.tables.files import FORMATS

        return FORMATS

    @property
    def _delimiter(self) -> str | None:
        return DELIMITERS.get(self.delimiter or "", self.delimiter)

    def find(self) -> None:
        """Asks the hub once, with a short time-out, whether it has the data; a launcher calls it.

        Raises:
            UserError: It has not, or does not answer.
        """
        if self.hub is not None:
            find_on_hub(self.hub, LOCAL_TABLES, self.config, self.revision)

    def tables(self) -> Tables:
        """Reads the splits, and draws those that are limited or held out.

        Raises:
            UserError: A file, a split or a row is not as it has to be.
        """
        splits = self._splits()
        train = _read(splits, "dataset.train_split", self.train_split)
        name, evaluation, warnings = self._evaluation(splits, train)
        rest, held_out = _divide(train, self.eval_fraction) if evaluation is None else (train, evaluation)
        limited = _limited(rest, self.max_train_samples), _limited(held_out, self.max_eval_samples)
        return Tables(*limited, name, train, warnings)

    @property
    def _held_out(self) -> str:
        """The part of the training split that is held out, in words."""
        return f"a part of {self.train_split} (dataset.eval_fraction={self.eval_fraction:g})"

    def _splits(self) -> Splits:
        from pipetransformer.data.tables.splits import hub_splits, local_splits

        if self.path is not None:
            return local_splits(Path(self.path), self._delimiter, self.formats)
        assert self.hub is not None
        return hub_splits(self.hub, self.config, self.revision)

    def _evaluation(self, splits: Splits, train: Rows) -> tuple[str, Rows | None, tuple[str, ...]]:
        """Returns name and rows of the split to evaluate on, ``None`` where they are held out, and warnings."""
        if self.eval_path is not None or self.eval_split is not None:
            return *self._wanted(splits, train), ()
        name = next((name for name in EVAL_SPLITS if name in splits and name != self.train_split), None)
        if name is None:
            return HELD_OUT, None, ()
        rows = splits[name]()
        reason = self._without_labels(rows, train) if name == TEST else ""
        if not reason:
            return name, rows, ()
        return HELD_OUT, None, (passed_over(name, f"{rows.name} {reason}", self._held_out),)

    def _wanted(self, splits: Splits, train: Rows) -> tuple[str, Rows]:
        """Returns name and rows of the split that the user names."""
        from pipetransformer.data.tables.splits import local_splits

        if self.eval_path is None:
            assert self.eval_split is not None
            option, name = f"dataset.eval_split={self.eval_split}", self.eval_split
            rows = _read(splits, "dataset.eval_split", name)
        else:
            option, stem = f"dataset.eval_path={self.eval_path}", Path(self.eval_path).stem
            name = stem if stem != TRAIN else "evaluation"
            rows = local_splits(Path(self.eval_path), self._delimiter, self.formats)["train"]()
        if reason := self._without_labels(rows, train):
            raise UserError(
                f"{option}: {rows.name} {reason}; name data with labels, or drop the option to hold a part of "
                f"{self.train_split} out"
            )
        return name, rows

    def _without_labels(self, rows: Rows, train: Rows) -> str:
        """Returns why there is nothing to evaluate in the rows of a split, as a predicate; empty where there is."""
        return ""


def passed_over(split: str, reason: str, instead: str) -> str:
    """Returns the warning about a split that could have been evaluated on."""
    return f"the split {split} is not evaluated on, because {reason}; {instead} is instead"


def _read(splits: Splits, option: str, name: str) -> Rows:
    if name not in splits:
        raise UserError(f"{option}={name}: there is no such split; there are {', '.join(splits)}")
    return splits[name]()


def _limited(rows: Rows, at_most: int | None) -> Rows:
    return rows if at_most is None else rows.take(subsample(len(rows), at_most))


def _divide(rows: Rows, fraction: float) -> tuple[Rows, Rows]:
    """Divides rows by a fixed draw; both parts keep their order."""
    if len(rows) < 2:
        raise UserError(f"{rows.name} has 1 row, and none is left to evaluate on; give more, or dataset.eval_path=")
    order = np.random.default_rng(SPLIT_SEED).permutation(len(rows))
    num_eval = min(len(rows) - 1, max(1, round(fraction * len(rows))))
    return rows.take(np.sort(order[num_eval:])), rows.take(np.sort(order[:num_eval]))

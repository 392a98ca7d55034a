"""Options of every table whose rows have labels: the task, the classes, and the loss and metrics over them."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.data.tables.spec import TableSpec
from pipetransformer.data.tasks import (
    ERRORS,
    METRICS,
    Task,
    multi_label_classification,
    regression,
    text_classification,
)
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.data.tables.labels import Labels
    from pipetransformer.data.tables.rows import Rows
    from pipetransformer.models.base import Head

TASKS = ("classification", "multi_label", "regression")
CLASS_METRICS = ("accuracy", "macro_f1")
PLAIN = re.compile(r"(?!(true|false|null|nan|inf)$)[a-z_][\w./-]*|-?\d+", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class LabelledTable(TableSpec, ABC):
    """Rows with labels.

    With ``task="auto"`` lists, texts with separators and several columns of labels are classes of which a sample has
    any number; numbers with a fraction are values; truth values, whole numbers (up to 20 different ones) and other
    texts (up to 100) are classes. Whatever is none of these is asked for.

    Lists name the classes of a row, or have a 0 or 1 for each class. The latter is what lists of fractions and of truth
    values are, and lists of whole numbers that are all 0 or 1, and of one length, 2 or more, in all training rows.

    Attributes:
        label: Column of the labels, or several columns of 0 and 1, one for each class.
        task: One of :data:`TASKS`, or ``auto``.
        labels: Names of the classes in order; ``None``: those of the training split, sorted.
        label_separator: Stands between the labels of a cell that has several, for example ``|``.
        class_weights: ``balanced`` (the number of samples over that of classes and of the class's samples), or one
            factor of the loss for each class, in their order or by their names.
        label_smoothing: Of classification, from 0 to below 1; see :class:`torch.nn.CrossEntropyLoss`.
        metrics: Of :data:`pipetransformer.data.tasks.METRICS`, the main one first; ``None``: those of the task.
    """

    label: Any = "label"
    task: str = "auto"
    labels: list[str | int | float | bool] | None = None
    label_separator: str | None = None
    class_weights: Any = None
    label_smoothing: float = 0.0
    metrics: list[str] | None = None

    def check(self) -> None:
        super().check()
        columns_of("label", self.label)
        if self.task not in ("auto", *TASKS):
            raise UserError(f"dataset.task={self.task} is no task; choose one of auto, {', '.join(TASKS)}")
        self._check_labels()
        self._check_metrics(None if self.task == "auto" else self.task)

    def _check_labels(self) -> None:
        names = self.labels or []
        if self.labels is not None and (len(names) < 2 or len({*map(str, names)}) < len(names)):
            raise UserError(f"dataset.labels={listed(names)} has to name two classes or more, each once")
        if self.label_separator == "":
            raise UserError("dataset.label_separator= is empty; give what stands between two labels, or null")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"dataset.label_smoothing={self.label_smoothing} must be 0 or more and below 1")
        weights = self.class_weights
        if weights is None or weights == "balanced":
            return
        given = [*weights.values()] if isinstance(weights, Mapping) else weights
        if not isinstance(given, Sequence) or isinstance(given, str) or not all(map(_is_weight, given)):
            raise UserError(
                f"dataset.class_weights={weights} is none of null, balanced, a list of numbers above 0, and such "
                "numbers by the names of classes, as {good: 1, bad: 2}"
            )

    def _check_metrics(self, task: str | None) -> None:
        """Refuses metrics that the task does not have; those of no task before the data says which it is."""
        known = METRICS[task] if task else tuple(dict.fromkeys(name for names in METRICS.values() for name in names))
        for name in self.metrics or ():
            if name not in known:
                of = f"of dataset.task={task} " if task else ""
                raise UserError(f"dataset.metrics: {name} is no metric {of}here; choose of {', '.join(known)}")
        if self.metrics is not None and (not self.metrics or self.metrics[0] in ERRORS):
            raise UserError(
                f"dataset.metrics={listed(self.metrics)} needs a main metric, the first one, of which more is better: "
                f"not {' or '.join(ERRORS)}"
            )

    def _without_labels(self, rows: Rows, train: Rows) -> str:
        from pipetransformer.data.tables.label_cells import without_labels

        return without_labels(rows, columns_of("label", self.label), train)

    def _find_labels(self, rows: Rows) -> Labels:
        """Finds the task and the classes in the rows of the training split."""
        from pipetransformer.data.tables.label_cells import name
        from pipetransformer.data.tables.labels import LabelOptions, Labels

        names = tuple(map(name, self.labels or ()))
        options = LabelOptions(columns_of("label", self.label), self.task, names, self.label_separator)
        return Labels.of(rows, options)

    def _task(self, labels: Labels, targets: np.ndarray) -> tuple[Task, np.ndarray | None]:
        """Returns the task of labels, and the weight of each class where the user wants weights.

        Args:
            targets: Those of the training samples.
        """
        self._check_metrics(labels.task)
        metrics = tuple(self.metrics or ())
        if labels.task == "classification":
            if "f1" in metrics and len(labels.names) != 2:
                raise UserError(
                    f"dataset.metrics: f1 is for two classes, and the data has {len(labels.names)}; take macro_f1 or "
                    "micro_f1"
                )
            weights = self._weights(labels.names, targets)
            factors = () if weights is None else tuple(weights.tolist())
            task = text_classification(
                len(labels.names), labels.names, metrics or CLASS_METRICS, factors, self.label_smoothing
            )
            return task, weights
        for option in ("class_weights", "label_smoothing"):
            if getattr(self, option):
                raise UserError(
                    f"dataset.{option}={getattr(self, option)} has no effect on dataset.task={labels.task}; drop it"
                )
        if labels.task == "multi_label":
            return multi_label_classification(len(labels.names), labels.names, metrics or METRICS["multi_label"]), None
        return regression(metrics or METRICS["regression"]), None

    def _note(self, labels: Labels, is_table: bool = True) -> str:
        """Returns what the data decided: the task of a table, and the class that F1 is of where it is that of one."""
        notes = [labels.note] * is_table
        if labels.task == "classification" and "f1" in (self.metrics or ()):
            notes += [f"f1 is that of the class {labels.names[1]}, the second (dataset.labels= names them in order)"]
        return "; ".join(notes)

    def _weights(self, names: tuple[str, ...], targets: np.ndarray) -> np.ndarray | None:
        """Returns the weight of each class, (C,) of float64."""
        given = self.class_weights
        if given is None:
            return None
        if given == "balanced":
            counts = np.bincount(targets, minlength=len(names))
            if absent := [name for name, count in zip(names, counts, strict=True) if not count]:
                raise UserError(
                    f"dataset.class_weights=balanced: no training sample has the class {absent[0]}; give its weight "
                    "with those of the others, by name"
                )
            return len(targets) / (len(names) * counts)
        if not isinstance(given, Mapping):
            if len(given) != len(names):
                raise UserError(
                    f"dataset.class_weights={listed(given)} are {len(given)} weights, and there are {len(names)} "
                    f"classes: {', '.join(names)}"
                )
            return np.array(given, dtype=np.float64)
        by_name = {_named(key, names): weight for key, weight in given.items()}
        if wrong := [*({*names} ^ {*by_name})]:
            what = "is no class" if wrong[0] in by_name else "has no weight"
            raise UserError(f"dataset.class_weights: {wrong[0]} {what}; give one for each of {', '.join(names)}")
        return np.array([by_name[name] for name in names], dtype=np.float64)


def task_of(head: Head) -> str:
    """Returns the task of a head as ``dataset.task=`` names it."""
    return str(head.problem_type).removeprefix("single_label_").removesuffix("_classification")


def another_task(wanted: str, found: str) -> str:
    """Returns the options, or the data, by which a table that was taken for one task is for another."""
    if wanted == "multi_label":
        return 'dataset.task=multi_label dataset.label_separator="|", or what else stands between two labels'
    return "data with one label in each row" if found == "multi_label" else f"dataset.task={wanted}"


def columns_of(option: str, given: Any) -> tuple[str, ...]:
    """Returns the columns that an option names: one, or a list.

    Raises:
        UserError: It is neither.
    """
    names = [given] if isinstance(given, str | int) else given
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str | int) for name in names):
        raise UserError(f"dataset.{option}={given} is no column; give its name, or several as [one,other]")
    if len({*names}) < len(names):
        raise UserError(f"dataset.{option}={listed(names)} names a column twice; give each once")
    return tuple(map(str, names))


def _named(key: Any, names: tuple[str, ...]) -> str:
    """Returns the class that a key of an option stands for, whose text may be a name as it is."""
    from pipetransformer.data.tables.label_cells import name

    spellings = (str(key), str(key).upper()) if isinstance(key, bool) else (str(key),)
    return next((spelling for spelling in spellings if spelling in names), name(key))


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def listed(values: Sequence[Any]) -> str:
    """Returns values as a list of the command line, in quotes where Hydra would read another value."""
    return f"[{','.join(map(_written, values))}]"


def _written(value: Any) -> str:
    return repr(value) if isinstance(value, str) and not PLAIN.fullmatch(value) else str(value)

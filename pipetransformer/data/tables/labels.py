"""Labels of a table: the task that they stand for, the names of classes, and the targets of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from pipetransformer.data.tables.base import shown
from pipetransformer.data.tables.label_cells import (
    NO_LABEL,
    NUMBER,
    WHOLE,
    class_names,
    column_of,
    distinct,
    first,
    flat_lists,
    holds_lists,
    is_fraction,
    is_multi_hot,
    is_plain,
    is_text,
    name,
    named,
    number,
    pc,
    present,
    refuse_missing,
    short,
)
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.data.tables.rows import Rows

MOST_CLASSES, MOST_WHOLE_NUMBERS = 100, 20  # different texts, or whole numbers, that are taken for classes
TRUTH = {"true": ("true", "True", "TRUE"), "false": ("false", "False", "FALSE")}  # as JSON, Python, and R or Excel do
MISSING = {"na", "n/a", "nan", "null", "none", "nil", "-", "--", "?", "."}  # in place of a number, in small letters
SWITCHES = dict.fromkeys(("1", "1.0", *TRUTH["true"]), 1) | dict.fromkeys(("0", "0.0", *TRUTH["false"]), 0)


@dataclass(frozen=True)
class LabelOptions:
    """A user's options for labels; see :class:`~pipetransformer.data.text.table.TextDataset`."""

    columns: tuple[str, ...]
    task: str = "auto"
    names: tuple[str, ...] = ()
    separator: str | None = None

    @property
    def text(self) -> str:
        """The option as the user wrote it."""
        return f"dataset.label={self.columns[0] if len(self.columns) == 1 else '[' + ','.join(self.columns) + ']'}"


@dataclass(frozen=True)
class Labels:
    """Labels as a task reads them.

    Attributes:
        options: Where they are, and what the user says about them.
        task: ``classification``, ``multi_label`` or ``regression``.
        names: The classes in order; none for regression.
        is_multi_hot: Cells are lists with a 0 or 1 for each class, in the training data and so in all.
        warnings: A task or classes that follow from how labels are written, and may not be those that are meant.
    """

    options: LabelOptions
    task: str
    names: tuple[str, ...] = ()
    is_multi_hot: bool = False
    warnings: tuple[str, ...] = ()

    @staticmethod
    def of(rows: Rows, options: LabelOptions) -> Labels:
        """Finds the task and the classes in the rows of the training split.

        Raises:
            UserError: There is no such column, or its cells are labels of no task.
        """
        for column in options.columns:
            rows.require("dataset.label", column)
        task = _task(rows, options) if options.task == "auto" else options.task
        _check_columns(rows, options, task)
        has_switches = task == "multi_label" and _has_switches(rows, options)
        names = () if task == "regression" else options.names or _names(rows, options, task, has_switches)
        if task != "regression" and len(names) < 2:
            found = f"only the class {shown(names)}" if names else "no class"
            raise UserError(
                f"{options.text}: {rows.name} has {found}; give rows of two classes or more, or name the classes by "
                "dataset.labels=[...]"
            )
        doubts = *_doubts(rows, options, task), *_near_names(options, names)
        return Labels(options, task, names, has_switches, doubts)

    @property
    def note(self) -> str:
        """The choice of the task, in words."""
        what = ", ".join(self.options.columns)
        if self.task == "regression":
            return f"{what} is a value"
        among = "one" if self.task == "classification" else "any"
        return f"{what} is {among} of {len(self.names)} classes ({shown(self.names, most=8)})"

    def targets(self, rows: Rows) -> np.ndarray:
        """Returns values (N,) of float64, classes (N,) of int64, or 1 and 0 for each class, (N, C) of int8.

        Raises:
            UserError: A row has no label, or one of another kind or class; the message names its place.
        """
        columns = self.options.columns
        for column in columns:
            rows.require("dataset.label", column)
        if self.task == "regression":
            return _mapped(rows, columns[0], number, "regression needs a finite number")
        if self.task == "classification":
            cells, codes = distinct(present(rows, columns[0]))
            classes = self._classes(rows, columns[0], cells, codes, np.arange(len(codes)))
            return classes[codes]
        if len(columns) > 1:
            switches = [_mapped(rows, column, _switch, "several columns are 0 or 1 each") for column in columns]
            return np.stack(switches, axis=1).astype(np.int8)
        return self._sets(rows, columns[0])

    def _sets(self, rows: Rows, column: str) -> np.ndarray:
        """Returns the classes of a column whose cells are lists, or texts with separators."""
        if self.is_multi_hot:
            return _multi_hot(rows, column, len(self.names))
        flat, parents = flat_lists(rows, column, self.options.separator)
        cells, codes = distinct(flat)
        classes = self._classes(rows, column, cells, codes, parents)
        targets = np.zeros((len(rows), len(self.names)), dtype=np.int8)
        targets[parents, classes[codes]] = 1
        return targets

    def _classes(
        self, rows: Rows, column: str, cells: list[object], codes: np.ndarray, places: np.ndarray
    ) -> np.ndarray:
        """Returns the class of each different cell.

        Args:
            codes: For each label which of the cells it is.
            places: For each label its row.

        Raises:
            UserError: A label is none of the classes.
        """
        known = {name: index for index, name in enumerate(self.names)}
        words = [name.lower() for name in self.names]
        truth = {
            name: TRUTH.get(word, ()) for name, word in zip(self.names, words, strict=True) if words.count(word) == 1
        }
        known = {other: known[name] for name, others in truth.items() for other in others} | known
        if self.options.names and not any(map(WHOLE.fullmatch, self.names)):
            known |= {str(index): index for index in range(len(self.names))}
        classes = np.array([known.get(each, NO_LABEL) for each in named(cells, rows.features[column])], dtype=np.int64)
        if (wrong := np.flatnonzero(classes[codes] == NO_LABEL)).size:
            reason = "none of dataset.labels=" if self.options.names else "no label of the training data"
            raise UserError(
                f"{rows.at(int(places[wrong[0]]))}: {column} is {short(cells[codes[wrong[0]]])}, which is {reason} "
                f"({shown(self.names)}); correct it, or name all classes by dataset.labels=[...]"
            )
        return classes


def _mapped(rows: Rows, column: str, value: Callable[[object], float], wanted: str) -> np.ndarray:
    """Returns the value of each cell, (N,) of float64.

    Raises:
        UserError: A cell has none that is finite.
    """
    cells, codes = distinct(present(rows, column))
    values = np.array([value(cell) for cell in cells], dtype=np.float64)[codes]
    if (wrong := np.flatnonzero(~np.isfinite(values))).size:
        others = f" (as in {len(wrong)} rows)" if len(wrong) > 1 else ""
        raise UserError(
            f"{rows.at(int(wrong[0]))}: {column} is {short(cells[codes[wrong[0]]])}{others}, and {wanted}; correct it "
            "or remove the row"
        )
    return values


def _switch(cell: object) -> float:
    return SWITCHES.get(str(cell).strip(), np.nan)


def _multi_hot(rows: Rows, column: str, num_classes: int) -> np.ndarray:
    """Returns lists of a 0 or 1 for each class, (N, num_classes) of int8."""
    cells = column_of(rows, column)
    refuse_missing(rows, column, pc.is_null(cells))
    if not holds_lists(cells.type) or not is_plain(cells.type.value_type) or is_text(cells.type.value_type):
        raise UserError(
            f"{rows.name} has cells of type {cells.type} in {column}, and the training data lists of a 0 or 1 for each "
            "class; give them alike"
        )
    lengths = pc.list_value_length(cells).to_numpy(zero_copy_only=False)
    if (wrong := np.flatnonzero(lengths != num_classes)).size:
        raise UserError(
            f"{rows.at(int(wrong[0]))}: {column} has {lengths[wrong[0]]} numbers, and there are {num_classes} classes; "
            "give one, 0 or 1, for each"
        )
    values = pc.list_flatten(cells).cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(len(rows), num_classes)
    if (wrong := np.flatnonzero(~np.isin(values, (0, 1)).all(1))).size:
        raise UserError(f"{rows.at(int(wrong[0]))}: {column} has other numbers than 0 and 1; give one for each class")
    return values.astype(np.int8)


def _task(rows: Rows, options: LabelOptions) -> str:
    """Returns the task by the rule of ``dataset.task=auto``."""
    column = options.columns[0]
    cells = column_of(rows, column)
    if len(options.columns) > 1 or options.separator is not None or holds_lists(cells.type):
        return "multi_label"
    if pa.types.is_boolean(cells.type) or options.names or class_names(rows.features[column]):
        return "classification"
    if is_fraction(cells.type):
        return "regression"
    texts = [str(cell).strip() for cell in distinct(cells)[0] if cell is not None and str(cell).strip()]
    are_whole = all(map(WHOLE.fullmatch, texts))
    if not are_whole and all(map(NUMBER.fullmatch, texts)):
        return "regression"
    _refuse_almost_numbers(rows, options, cells, texts)
    most, found = (MOST_WHOLE_NUMBERS, "whole numbers") if are_whole else (MOST_CLASSES, "texts")
    if len(texts) <= most:
        return "classification"
    regression = "dataset.task=regression or " if are_whole else ""
    raise UserError(
        f"{options.text}: {rows.name} has {len(texts)} different {found} there, more than the {most} that are taken "
        f"for classes; name another column, or give {regression}dataset.task=classification"
    )


def _refuse_almost_numbers(rows: Rows, options: LabelOptions, cells: pa.Array, texts: list[str]) -> None:
    """Refuses numbers with a decimal comma, and numbers beside what stands for a missing one: classes they are not."""
    missing = {text for text in texts if text.lower() in MISSING}
    numbers = [text for text in texts if text not in missing]
    if len(numbers) < 2 or not all(NUMBER.fullmatch(text.replace(",", ".", 1)) for text in numbers):
        return
    odd = [text for text in numbers if "," in text]
    if not missing and not odd:
        return
    text, remedy = min(missing | {*odd}), "write it with a point" if odd and not missing else "write a number there"
    row = rows.at(first(pc.equal(pc.utf8_trim_whitespace(pc.cast(cells, pa.string())), text)))
    raise UserError(
        f"{options.text}: {row} has {text!r} among numbers; {remedy} or remove the row, or give "
        "dataset.task=classification if it is a class"
    )


def _doubts(rows: Rows, options: LabelOptions, task: str) -> tuple[str, ...]:
    """Returns a warning where few whole numbers are values only because they are written with a point, as 1.0."""
    if options.task != "auto" or task != "regression":
        return ()
    found = {number(cell) for cell in distinct(column_of(rows, options.columns[0]))[0] if cell is not None}
    values = sorted(value for value in found if not np.isnan(value))
    if len(values) > MOST_WHOLE_NUMBERS or not all(value.is_integer() for value in values):
        return ()
    return (
        f"{options.text} has {len(values)} different labels, all whole ({shown([*map(str, values)])}), and the task is "
        "regression because they are written with a point; give dataset.task=classification if they are classes, or "
        "dataset.task=regression if they are values",
    )


def _near_names(options: LabelOptions, names: Iterable[str]) -> Iterator[str]:
    """Yields a warning where names of classes that the data gave differ by case alone, as True and true."""
    seen: dict[str, str] = {}
    for each in () if options.names else names:
        other = seen.setdefault(each.casefold(), each)
        if other != each:
            yield (
                f"{options.text}: the labels {other} and {each} differ by case alone and are two classes; write them "
                "alike if they are one, or name all classes by dataset.labels=[...]"
            )
            return


def _check_columns(rows: Rows, options: LabelOptions, task: str) -> None:
    """Refuses columns of a type that the task cannot read."""
    several = len(options.columns) > 1
    if several and task != "multi_label":
        raise UserError(f"{options.text} names {len(options.columns)} columns; give one, or dataset.task=multi_label")
    if several and options.names:
        raise UserError(f"dataset.labels= has no effect, as {options.text} names a column for each class; drop it")
    if options.separator is not None and (reason := _without_separator(rows, options, task)):
        raise UserError(f"dataset.label_separator={options.separator} has no effect, as {reason}; drop it")
    for column in options.columns:
        kind = column_of(rows, column).type
        in_lists = task == "multi_label" and not several
        if in_lists and is_text(kind) and options.separator is None:
            raise UserError(
                f"{options.text}: {rows.name} has text there, and dataset.task=multi_label needs lists; say what "
                'stands between two labels by dataset.label_separator=, for example "|"'
            )
        if not (holds_lists(kind) or is_text(kind) if in_lists else is_plain(kind)):
            raise UserError(
                f"{options.text}: {rows.name} has cells of type {kind} there, which dataset.task={task} cannot read"
            )


def _without_separator(rows: Rows, options: LabelOptions, task: str) -> str | None:
    """Returns why no cell has several labels with a separator between them; ``None`` where some may."""
    if task != "multi_label":
        return f"a sample has one label with dataset.task={task}"
    if len(options.columns) > 1:
        return f"{options.text} names a column for each class"
    cells = column_of(rows, options.columns[0])
    return f"{options.text}: {rows.name} has lists there" if holds_lists(cells.type) else None


def _has_switches(rows: Rows, options: LabelOptions) -> bool:
    """Returns whether the one column of labels has lists of a 0 or 1 for each class."""
    column = options.columns[0]
    is_named = bool(class_names(rows.features[column]))
    return len(options.columns) == 1 and not is_named and is_multi_hot(column_of(rows, column))


def _names(rows: Rows, options: LabelOptions, task: str, has_switches: bool) -> tuple[str, ...]:
    """Returns the classes that there are, numbers in their order, else by the alphabet."""
    column = options.columns[0]
    if len(options.columns) > 1:
        return options.columns
    if given := class_names(rows.features[column]):
        return given
    cells = column_of(rows, column)
    if has_switches:
        return tuple(map(str, range(pc.max(pc.list_value_length(cells)).as_py() or 0)))
    labels: Iterable[object] = distinct(
        cells if task == "classification" else flat_lists(rows, column, options.separator)[0]
    )[0]
    names = {name(label) for label in labels if label is not None and label == label} - {""}  # NaN equals nothing
    if all(map(WHOLE.fullmatch, names)):
        return tuple(sorted(names, key=lambda each: (int(each), each)))  # 1 and 01 are two classes
    return tuple(sorted(names))

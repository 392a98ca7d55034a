"""Samples without targets, for ``pipetransformer-predict``: their tables, and a split that gives probabilities."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.data.base import Split
from pipetransformer.data.tables import Table, read_tsv
from pipetransformer.data.tasks import Task
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

TABLES = ".csv, .tsv, .jsonl (a JSON object in each line) or .txt (a text in each line)"


@dataclass(frozen=True)
class Unlabelled:
    """Samples to predict.

    Attributes:
        split: Their inputs. Its predictions are what its ``rows`` take; it has no targets that mean anything.
        task: Of the run.
        input_shape: (C, H, W) of an image, () for text.
    """

    split: Split
    task: Task
    input_shape: tuple[int, ...] = ()


class ScoredSplit(Split):
    """The samples of a split with the probability of each class, or with a value each.

    Args:
        split: Gives the inputs.
        names: What names each sample in its row.
        labels: Names of the classes; none for values.
        has_several: A sample has any number of classes.
    """

    def __init__(
        self, split: Split, names: Sequence[Mapping[str, Any]], labels: tuple[str, ...], has_several: bool = False
    ) -> None:
        assert len(names) == len(split), (len(names), len(split))
        self.name, self.lengths = split.name, split.lengths
        self._split, self._names, self._labels, self._has_several = split, names, labels, has_several

    def __len__(self) -> int:
        return len(self._split)

    def identity(self) -> str:
        return self._split.identity()

    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        return self._split.inputs(ids, num_tokens, epoch)

    def context(self, ids: Sequence[int], num_tokens: int | None) -> dict[str, Tensor]:
        return self._split.context(ids, num_tokens)

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        raise TypeError("samples to predict have no targets")

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """Returns probabilities (B, C), or values (B,)."""
        if not self._labels:
            return outputs.squeeze(1)
        return outputs.float().sigmoid() if self._has_several else outputs.float().softmax(-1)

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        raise TypeError("samples to predict have no targets")

    def rows(self, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yields the likeliest class, or those above 1/2, with the probability of each; or the value."""
        for name, predicted in zip(self._names, predictions.tolist(), strict=True):
            if not self._labels:
                yield {**name, "prediction": predicted}
            else:
                scores = dict(zip(self._labels, predicted, strict=True))
                likeliest = self._labels[int(np.argmax(predicted))]
                above = [label for label, score in scores.items() if score > 0.5]
                yield {**name, "prediction": above if self._has_several else likeliest, "scores": scores}


class ScoredSets(ScoredSplit):
    """The samples of a split with the probability of each class, of which a sample has any number."""

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """Returns probabilities (B, C), each class on its own."""
        return outputs.float().sigmoid()

    def rows(self, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yields the classes whose probability is above 1/2, with the probability of each."""
        for name, predicted in zip(self._names, predictions.tolist(), strict=True):
            scores = dict(zip(self._labels, predicted, strict=True))
            yield {**name, "prediction": [each for each, score in scores.items() if score > 0.5], "scores": scores}


def read_table(file: Path, text_column: str | None) -> Table:
    """Reads a table by its ending.

    Args:
        text_column: Name of the only column of a ``.txt`` file; ``None``: the task takes more than one text.

    Raises:
        UserError: It is none of :data:`TABLES`, is damaged, or has no rows.
    """
    try:
        table = _read(file, text_column)
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"input={file} cannot be read ({error}); give a {TABLES}") from error
    if len(table) == 0:
        raise UserError(f"input={file} has no rows")
    return table


def _read(file: Path, text_column: str | None) -> Table:
    match file.suffix.lower():
        case ".tsv":
            return read_tsv(file)
        case ".csv":
            with file.open(encoding="utf-8-sig", newline="") as lines:
                header, *rows = csv.reader(lines, strict=True)
            for row, cells in enumerate(rows):
                if len(cells) != len(header):
                    raise UserError(f"row {row} of {file} has {len(cells)} cells, and the header has {len(header)}")
            return Table(str(file), {name: [row[i] for row in rows] for i, name in enumerate(header)})
        case ".jsonl" | ".json":
            records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
            if wrong := [row for row, record in enumerate(records) if not isinstance(record, dict)]:
                raise UserError(f"row {wrong[0]} of {file} is no JSON object; write one in each line")
            names = dict.fromkeys(name for record in records for name in record)
            return Table(str(file), {name: [record.get(name) for record in records] for name in names})
        case ".txt" if text_column is not None:
            return Table(str(file), {text_column: file.read_text(encoding="utf-8").splitlines()}, first_line=1)
    raise UserError(f"input={file} is no table that this run's data takes; give a {TABLES}")

"""Samples without targets, for ``pipetransformer-predict``: their tables, and a split that gives probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.data.base import Split
from pipetransformer.data.tables.published import Table
from pipetransformer.data.tasks import Task
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from pipetransformer.data.tables.files import Formats


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
        self.is_slow, self.read_ahead = split.is_slow, split.read_ahead
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


def formats_of_inputs(has_one_text: bool) -> Formats:
    """Returns the formats of a table to predict; where a sample is one text, lines of a ``.txt`` file, too."""
    from pipetransformer.data.tables.files import FORMATS
    from pipetransformer.data.text.document_files import TextFile

    return {**FORMATS, ".txt": TextFile} if has_one_text else FORMATS


def row_names(file: Path, num_rows: int) -> list[dict[str, int]]:
    """Returns what names each sample of a table: its row, or in a ``.txt`` file its line, both from 0.

    Blank lines are no samples, and count as lines.
    """
    from pipetransformer.data.text.document_files import TextFile

    is_text = file.suffix.lower() == ".txt"
    numbers = (line - 1 for line, _ in TextFile(file).records()) if is_text else range(num_rows)
    return [{"row": number} for number in numbers]


def read_table(file: Path, text_column: str | None) -> Table:
    """Reads a table by its ending, as those of ``dataset=text`` are read, or the lines of a ``.txt`` file.

    Args:
        text_column: Name of the only column of a ``.txt`` file; ``None``: the task takes more than one text.

    Raises:
        UserError: It is no table, is damaged, or has no rows.
    """
    from pipetransformer.data.tables.rows import read_files
    from pipetransformer.data.text.document_files import TEXT

    if not file.is_file():
        raise UserError(f"input={file} is no file")
    rows = read_files((file,), formats=formats_of_inputs(text_column is not None))
    columns = {name: rows.column(name).to_pylist() for name in rows.features}
    if text_column and file.suffix.lower() == ".txt":
        columns = {text_column: columns[TEXT]}
    return Table(str(file), columns)

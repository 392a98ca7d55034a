"""Any table of texts with labels: classes, several classes at once, or values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipetransformer.data.base import Data, ImageFormat, TextFormat
from pipetransformer.data.tables.labelled import LabelledTable, columns_of, listed
from pipetransformer.data.tasks import MULTI_LABEL, Task, multi_label_classification, text_classification
from pipetransformer.data.text.kept import kept
from pipetransformer.data.text.split import (
    MIN_LENGTH,
    LabelledTexts,
    beyond_the_model,
    check_tokens,
    cut_off,
    encode_batches,
)
from pipetransformer.data.unlabelled import ScoredSplit, Unlabelled, formats_of_inputs, row_names
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head

if TYPE_CHECKING:
    from pipetransformer.data.tables.labels import Labels
    from pipetransformer.data.tables.rows import Rows


@dataclass(frozen=True, kw_only=True)
class TextDataset(LabelledTable):
    """Texts, or pairs of texts, with labels.

    Attributes:
        text: Column of the texts, or two for pairs.
        max_length: Tokens of a sample at most, special tokens included.
    """

    text: Any = "text"
    max_length: int = 256

    modality: ClassVar[str] = "text"

    def check(self) -> None:
        super().check()
        texts, labels = columns_of("text", self.text), columns_of("label", self.label)
        if len(texts) > 2:
            raise UserError(f"dataset.text={listed(texts)} names {len(texts)} columns; give one, or two for pairs")
        if twice := {*texts} & {*labels}:
            raise UserError(f"dataset.label={twice.pop()} is a column of dataset.text= too; name the column of labels")
        if self.max_length < MIN_LENGTH:
            raise UserError(f"dataset.max_length={self.max_length} is too short for a text; give {MIN_LENGTH} or more")

    def preflight(self) -> int | None:
        self.find()
        if self.path is None:
            return None
        tables = self.tables()
        labels = self._labels(tables.known)
        for rows in (tables.train, tables.evaluation):
            for _ in self._texts(rows):
                pass
        self._task(labels, labels.targets(tables.train))
        labels.targets(tables.evaluation)
        return len(tables.train)

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, TextFormat)
        tables = self.tables()
        labels = self._labels(tables.known)
        task, weights = self._task(labels, labels.targets(tables.train))
        train = self._split("train", tables.train, labels, task, wanted, weights)
        evaluation = self._split(tables.eval_name, tables.evaluation, labels, task, wanted, weights)
        cut = (text for split in (train, evaluation) for text in cut_off(split, self.max_length, wanted))
        warnings = *tables.warnings, *labels.warnings, *beyond_the_model(self.max_length, wanted), *cut
        return Data(train, (evaluation,), task, note=self._note(labels), warnings=warnings)

    def unlabelled(self, source: Path, wanted: ImageFormat | TextFormat, head: Head) -> Unlabelled:
        from pipetransformer.data.tables.rows import read_files
        from pipetransformer.data.tables.text_cells import text_batches
        from pipetransformer.data.text.document_files import TEXT

        assert isinstance(wanted, TextFormat)
        columns = columns_of("text", self.text)
        rows = read_files((source,), self._delimiter, formats_of_inputs(len(columns) == 1))
        columns = (TEXT,) if source.suffix.lower() == ".txt" else columns
        texts = text_batches(rows, columns, refuse_numbers=False)
        tokens = encode_batches(texts, wanted.tokenizer, min(self.max_length, wanted.max_length))
        check_tokens(tokens, wanted, rows.at)
        num_classes, has_sets = head.num_outputs, head.problem_type == MULTI_LABEL
        task = multi_label_classification(num_classes) if has_sets else text_classification(num_classes)
        split = LabelledTexts("input", tokens, np.zeros(len(rows), dtype=np.int64), task)
        return Unlabelled(ScoredSplit(split, row_names(source, len(rows)), head.labels, has_sets), task)

    def _labels(self, rows: Rows) -> Labels:
        for column in columns_of("text", self.text):
            rows.require("dataset.text", column)
        return self._find_labels(rows)

    def _texts(self, rows: Rows) -> Iterator[tuple[list[str], ...]]:
        from pipetransformer.data.tables.text_cells import text_batches

        return text_batches(rows, columns_of("text", self.text))

    def _split(
        self, name: str, rows: Rows, labels: Labels, task: Task, wanted: TextFormat, weights: np.ndarray | None
    ) -> LabelledTexts:
        targets, max_length = labels.targets(rows), min(self.max_length, wanted.max_length)
        tokens = kept(encode_batches, lambda: self._texts(rows), wanted.tokenizer, max_length)
        check_tokens(tokens, wanted, rows.at)
        return LabelledTexts(name, tokens, targets, task, None if weights is None else weights[targets])

"""A tag for each word of a sentence, from CoNLL's files or from tables with lists of words and of tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pipetransformer.data.base import Data, ImageFormat, TextFormat
from pipetransformer.data.tables.spec import Tables, TableSpec
from pipetransformer.data.tasks import Task
from pipetransformer.data.text.kept import kept
from pipetransformer.data.text.split import MIN_LENGTH, beyond_the_model, check_tokens
from pipetransformer.data.token_tasks import token_classification
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.data.tables.files import Formats
    from pipetransformer.data.tables.rows import Rows
    from pipetransformer.data.text.tagged_rows import TaggedRows
    from pipetransformer.data.text.tagged_split import TaggedSplit

OUTSIDE = "O"  # tag of a word in no chunk
IN_CHUNK = re.compile(r"[BIESLUMW]-.+")
BARE = {*"BIESLUMW"}  # where all chunks are of one type


@dataclass(frozen=True, kw_only=True)
class TokenClassification(TableSpec):
    """Named entities, chunks, parts of speech: a tag for each word.

    The first token of a word carries its tag, and its other tokens do not count. Words that do not fit ``max_length``
    count neither in the loss nor in the scores, as in transformers' example; the run says how many. Nor do words whose
    tag is the number -100, which stands for none.

    Attributes:
        tokens: Column with the list of a sentence's words; in CoNLL's files the first one, which is called so.
        tags: Column with the list of their tags; in CoNLL's files the last one is called so, and those between by
            their number, from ``1``.
        labels: All tags, in the order of the model's outputs; ``None``: those of the training data by the alphabet, or
            in the order that the data has for them.
        chunks: The tags mark chunks by prefixes, as in B-PER, and F1 over chunks is the main metric; ``False``: the
            accuracy is. ``None``: by the tags.
        max_length: Tokens of a sentence at most, special tokens included.
    """

    tokens: str = "tokens"
    tags: str = "tags"
    labels: list[str] | None = None
    chunks: bool | None = None
    max_length: int = 128

    modality: ClassVar[str] = "text"
    libraries: ClassVar[tuple[str, ...]] = ("datasets", "seqeval.metrics.sequence_labeling")

    @property
    def formats(self) -> Formats:
        from pipetransformer.data.text.conll_files import CONLL_FORMATS

        return CONLL_FORMATS

    def check(self) -> None:
        super().check()
        if self.max_length < MIN_LENGTH:
            raise UserError(f"dataset.max_length={self.max_length} is too short for a text; give {MIN_LENGTH} or more")
        if self.labels is not None and len({*self.labels}) != max(2, len(self.labels)):
            raise UserError(f"dataset.labels={list(self.labels)} must be two or more tags, each of them once")

    def preflight(self) -> int | None:
        if self.path is None:
            self.find()
            return None
        _, train, _ = self._tagged(self.tables())
        return len(train)

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, TextFormat)
        tables = self.tables()
        task, train, evaluation = self._tagged(tables)
        splits = [self._split("train", train, task, wanted), self._split(tables.eval_name, evaluation, task, wanted)]
        cut = filter(None, map(_cut, splits))
        warnings = *tables.warnings, *beyond_the_model(self.max_length, wanted), *cut
        return Data(splits[0], (splits[1],), task, warnings=warnings)

    def _without_labels(self, rows: Rows, train: Rows) -> str:
        from pipetransformer.data.tables.label_cells import without_labels

        return without_labels(rows, (self.tags,), train)

    def _tagged(self, tables: Tables) -> tuple[Task, TaggedRows, TaggedRows]:
        """Returns the task, and the data to train and to evaluate on, all tags checked."""
        from pipetransformer.data.text.tagged_rows import TaggedRows, check_words, find_labels, first_with

        labels = self.labels or find_labels(tables.known, self.tags)
        train, evaluation = (
            TaggedRows(rows, self.tokens, self.tags, labels) for rows in (tables.train, tables.evaluation)
        )
        place = partial(first_with, tables.known, self.tokens, self.tags, labels)
        chunks = mark_chunks(labels, place) if self.chunks is None else self.chunks
        if self.chunks:
            refuse_other_tags(labels, place)
        check_words(tables.known, self.tokens)
        return token_classification(tuple(labels), chunks), train, evaluation

    def _split(self, name: str, rows: TaggedRows, task: Task, wanted: TextFormat) -> TaggedSplit:
        from pipetransformer.data.text.tagged_split import TaggedSplit, align

        words = kept(align, rows.sentences, wanted.tokenizer, min(self.max_length, wanted.max_length))
        check_tokens(words.tokens, wanted, rows.at)
        return TaggedSplit(name, words, rows.tags, rows.sentences, task)


def mark_chunks(labels: Sequence[str], place: Callable[[str], str] = str) -> bool:
    """Returns whether tags mark chunks by their prefixes, as B-PER does; else each stands for itself, as NOUN does.

    Args:
        labels: The tags.
        place: Returns a tag with the place where it is found, for the message.

    Raises:
        UserError: Some do and some do not.
    """
    inside = [label for label in labels if label != OUTSIDE]
    if BARE.issuperset(inside) and "B" in inside:
        return True
    chunks = [label for label in inside if IN_CHUNK.fullmatch(label)]
    if len(chunks) not in (0, len(inside)):
        other = next(label for label in inside if label not in chunks)
        raise UserError(
            f"the tag {place(chunks[0])} is one of a chunk and {place(other)} is not; give each tag but {OUTSIDE} a "
            "prefix as in B-PER, or dataset.chunks=false if they do not mark chunks"
        )
    return bool(chunks)


def refuse_other_tags(labels: Sequence[str], place: Callable[[str], str]) -> None:
    """Refuses a tag of the data that marks no chunk: seqeval would read another one out of it.

    Args:
        labels, place: As for :func:`mark_chunks`.

    Raises:
        UserError: With the tag and its place.
    """
    inside = [label for label in labels if label != OUTSIDE]
    others = () if BARE.issuperset(inside) else (tag for tag in inside if not IN_CHUNK.fullmatch(tag))
    for tag in others:
        found = place(tag)
        if found != tag:  # else nothing has it
            raise UserError(
                f"dataset.chunks=true: the tag {found} marks no chunk; give each tag but {OUTSIDE} a prefix as in B-PER"
            )


def _cut(split: TaggedSplit) -> str | None:
    """Returns what is said of words without a token; ``None`` where all have one."""
    if not split.num_lost:
        return None
    return (
        f"{split.num_lost} words of the {split.name} split count neither in the loss nor in the scores, because they "
        "have no token; raise dataset.max_length if their sentences were cut"
    )

"""Rows of sentences: a list of words and a list of their tags in each, checked as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import ClassLabel

from pipetransformer.data.tables.base import shown
from pipetransformer.data.tables.rows import Rows
from pipetransformer.data.text.split import Ragged
from pipetransformer.data.token_tasks import IGNORED
from pipetransformer.errors import UserError

UNKNOWN = -1
ONE_EACH = {"tokens": "a text", "tags": "the name or number of a tag"}


class TaggedRows:
    """Sentences whose words each have a known tag.

    Args:
        rows: A row for each sentence.
        tokens: Column with the lists of words.
        tags: Column with the lists of tags: their names, or their numbers.
        labels: Names of all tags; a number is the place in them.

    Attributes:
        tags: Numbers of the tags of each sentence's words, ``IGNORED`` for words that the data leaves out by it.

    Raises:
        UserError: A column is missing or has no lists, a row has another number of tags than of words, or a tag is not
            among the labels; the message names the row and the word.
    """

    def __init__(self, rows: Rows, tokens: str, tags: str, labels: Sequence[str]) -> None:
        self._rows, self._tokens = rows, tokens
        words, names = _lists(rows, "tokens", tokens), _lists(rows, "tags", tags)
        lengths, num_tags = (np.diff(each.offsets.to_numpy()) for each in (words, names))
        if len(wrong := np.flatnonzero(lengths != num_tags)):
            row = int(wrong[0])
            raise UserError(
                f"{rows.at(row)} has {lengths[row]} {tokens} and {num_tags[row]} {tags}; give each word one tag"
            )
        encoded = names.flatten().dictionary_encode()
        known = _numbers(rows, tags, names.type.value_type, labels)
        numbers = [known.get(value, UNKNOWN) for value in (*encoded.dictionary.to_pylist(), None)]
        places = encoded.indices.fill_null(len(numbers) - 1).to_numpy()
        self.tags = Ragged(np.array(numbers, dtype=np.int32)[places], np.cumsum([0, *lengths]))
        self._check(words.flatten(), names.flatten(), labels)

    def _check(self, words: pa.Array, names: pa.Array, labels: Sequence[str]) -> None:
        """Refuses the first word without a text or with an unknown tag."""
        has_no_text = words.is_null().to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(has_no_text | (self.tags.values == UNKNOWN))
        if not len(wrong):
            return
        word = int(wrong[0])
        place = self.place(word)
        if has_no_text[word]:
            raise UserError(f"{place} has no text; give each word one")
        found = f"the tag {names[word].as_py()!r}" if names[word].is_valid else "no tag"
        raise UserError(
            f"{place} ({words[word].as_py():.40}) has {found}, and the known ones are {shown(labels)}; correct it, or "
            "name all tags by dataset.labels="
        )

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, row: int) -> str:
        """Names the place of a sentence for a message."""
        return self._rows.at(row)

    def place(self, word: int) -> str:
        """Names the place of a word, numbered over all sentences, for a message."""
        row = int(np.searchsorted(self.tags.starts, word, side="right")) - 1
        return f"{self.at(row)}, word {word - self.tags.starts[row] + 1}"

    def sentences(self) -> Iterator[list[str]]:
        """Yields the words of each sentence, read as they are needed."""
        for _, batch in self._rows.batches([self._tokens]):
            yield from batch[self._tokens].to_pylist()


def find_labels(rows: Rows, tags: str) -> list[str]:
    """Returns the tags of the rows: in the order that the data has for them, else sorted.

    Raises:
        UserError: There is no column of tags, or only one tag.
    """
    tags_there = _lists(rows, "tags", tags).flatten().unique().drop_null().sort().to_pylist()
    found = [tag for tag in tags_there if tag != IGNORED]
    if len(found) < 2:
        raise UserError(
            f"dataset.tags={tags}: {rows.name} has {f'the one tag {found[0]}' if found else 'no tags'}; there is "
            f"nothing to learn. Its columns are {shown(rows.features)}"
        )
    return _class_names(rows, tags) or [str(tag) for tag in found]


def check_words(rows: Rows, tokens: str) -> None:
    """Refuses a column of words that are all numbers, as the places of words in a sentence are.

    Raises:
        UserError: With the columns that there are.
    """
    words = _lists(rows, "tokens", tokens).flatten().unique().drop_null().to_pylist()
    if words and all(re.fullmatch(r"\d+([-.]\d+)?", word) for word in words):
        raise UserError(
            f"dataset.tokens={tokens}: {rows.name} has nothing but numbers there, as {words[0]}; name the column of "
            f"the words, one of {shown(rows.features)}"
        )


def first_with(rows: Rows, tokens: str, tags: str, labels: Sequence[str], tag: str) -> str:
    """Returns a tag with the place of the first word that has it, for a message."""
    tagged = TaggedRows(rows, tokens, tags, labels)
    words = np.flatnonzero(tagged.tags.values == labels.index(tag))
    return f"{tag} ({tagged.place(int(words[0]))})" if len(words) else tag


def _lists(rows: Rows, option: str, column: str) -> pa.ListArray:
    """Reads a column of lists of texts or, for tags, of numbers."""
    rows.require(f"dataset.{option}", column)
    lists = rows.column(column).combine_chunks()
    of = lists.type.value_type if pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type) else None
    is_text = of is not None and (pa.types.is_string(of) or pa.types.is_large_string(of))
    is_number = option == "tags" and of is not None and pa.types.is_integer(of)
    if not (is_text or is_number):
        raise UserError(
            f"dataset.{option}={column}: {rows.name} has {lists.type} in it; give a list with {ONE_EACH[option]} for "
            "each word of a sentence"
        )
    if lists.null_count:
        row = int(np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False))[0])
        raise UserError(f"{rows.at(row)} has no {column}; give a list, or remove the row")
    return lists


def _numbers(rows: Rows, tags: str, kind: pa.DataType, labels: Sequence[str]) -> dict[Any, int]:
    """Maps the values of the column of tags to the numbers of the labels; among numbers -100 is no tag."""
    if not pa.types.is_integer(kind):
        return {label: number for number, label in enumerate(labels)}
    if names := _class_names(rows, tags):
        return {value: labels.index(name) for value, name in enumerate(names) if name in labels} | {IGNORED: IGNORED}
    are_numbers = all(re.fullmatch(r"-?\d+", label) for label in labels)
    known = {int(label) if are_numbers else number: number for number, label in enumerate(labels)}
    return known | {IGNORED: IGNORED}


def _class_names(rows: Rows, tags: str) -> list[str] | None:
    """Returns the names that the data has for the numbers of its tags."""
    kind = getattr(rows.features[tags], "feature", None)
    return list(kind.names) if isinstance(kind, ClassLabel) else None

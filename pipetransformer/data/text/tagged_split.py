"""Sentences with a tag for each word: which token carries the tag, and the split that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.data.tasks import Task
from pipetransformer.data.text.split import CHUNK, Ragged, TextSplit, Tokens, padding_id
from pipetransformer.data.token_tasks import IGNORED
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

NO_TOKEN = -1


@dataclass(frozen=True)
class Words:
    """The words of sentences that have a token: all but those cut off, and those of which a tokenizer leaves nothing.

    Attributes:
        tokens: The sentences, tokenised.
        numbers: For each word its place in its sentence, from 0.
        first: For each word its first token, which carries the tag.
    """

    tokens: Tokens
    numbers: Ragged
    first: Ragged


def align(sentences: Iterator[list[str]], tokenizer: Any, max_length: int) -> Words:
    """Tokenises sentences and finds the first token of each word.

    The words are joined by spaces and tokenised as text, so that a tokenizer that marks the beginning of a word by its
    space gives what it gives for running text. The first token of a word is the first that ends within it.

    Args:
        sentences: The words of each sentence.
        tokenizer: A fast tokenizer of transformers.
        max_length: Tokens to keep, special tokens included.
    """
    pad_id = padding_id(tokenizer)
    ids: list[list[int]] = []
    type_ids: list[list[int]] = []
    numbers: list[np.ndarray] = []
    first: list[np.ndarray] = []
    while chunk := list(islice(sentences, CHUNK)):
        encoded = tokenizer(
            [" ".join(words) for words in chunk],
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_offsets_mapping=True,
        )
        ids += encoded["input_ids"]
        type_ids += encoded.get("token_type_ids", [])
        for words, offsets in zip(chunk, encoded["offset_mapping"], strict=True):
            of_sentence = _first_tokens(words, np.array(offsets).reshape(-1, 2))
            numbers.append(of_sentence[0])
            first.append(of_sentence[1])
    tokens = Tokens(Ragged.of(ids), Ragged.of(type_ids) if type_ids else None, pad_id)
    return Words(tokens, Ragged.of(numbers), Ragged.of(first))


def _first_tokens(words: list[str], offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the words that have a token, and the first token of each.

    Args:
        words: The words of a sentence.
        offsets: First character of each token and the one after its last in the words joined by spaces, (T, 2);
            special tokens have none.
    """
    ends = np.cumsum([len(word) + 1 for word in words]) - 1  # (words,), without the space that follows
    last = offsets[:, 1] - 1  # the space before a word belongs to its first token
    word = np.searchsorted(ends, last, side="right")  # (T,)
    starts = np.append(0, ends + 1)
    covers = (offsets[:, 1] > offsets[:, 0]) & (last >= starts[word])
    tokens = np.flatnonzero(covers)
    numbers, first = np.unique(word[covers], return_index=True)
    return numbers, tokens[first]


class TaggedSplit(TextSplit):
    """Sentences with a tag for each word; a sample is a sentence.

    Args:
        name: Name of the split.
        words: The sentences, tokenised, with the words that have a token.
        tags: Number of the tag of each word, by sentence.
        sentences: Returns the words of each sentence, for :meth:`rows`.
        task: The task, whose head has the names of the tags.

    Attributes:
        num_lost: Words without a token, which count neither in the loss nor in the scores.

    Raises:
        UserError: No word has a token.
    """

    def __init__(
        self, name: str, words: Words, tags: Ragged, sentences: Callable[[], Iterable[list[str]]], task: Task
    ) -> None:
        super().__init__(name, words.tokens)
        self.task, self._sentences = task, sentences
        places = np.repeat(tags.starts[:-1], words.numbers.lengths) + words.numbers.values
        if len(places) == 0:
            raise UserError(f"no word of the {name} split has a token; check dataset.tokens and dataset.max_length")
        found = tags.values[places]
        counts = found != IGNORED
        self.num_lost = int((tags.values != IGNORED).sum() - counts.sum())
        if not counts.any():
            raise UserError(f"no word of the {name} split has a tag, but {IGNORED}, which is none; check dataset.tags")
        starts = np.append(0, np.cumsum(counts))[words.numbers.starts]
        numbers, first, self._tags = (
            Ragged(each[counts], starts) for each in (words.numbers.values, words.first.values, found)
        )
        self._words = Words(words.tokens, numbers, first)
        self.loss_weights = numbers.lengths.astype(np.float64)

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        """Returns the number of the tag at the first token of each word, (B, T), else ``IGNORED``."""
        import torch

        rows = np.asarray(ids)
        targets = np.full((len(rows), self.width(rows, num_tokens)), IGNORED, dtype=np.int64)
        for target, row in zip(targets, rows, strict=True):
            target[self._words.first[row]] = self._tags[row]
        return torch.from_numpy(targets)

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """Returns the number of each word's tag, (B, most words of a sentence), ``IGNORED`` after the last one."""
        import torch

        width = int(self._tags.lengths.max())
        first = torch.from_numpy(self._words.first.padded(np.asarray(ids), width, NO_TOKEN)).to(outputs.device)
        tags = self.task.predict(outputs).gather(1, first.long().clamp(min=0))  # (B, T) -> (B, width)
        return tags.masked_fill(first == NO_TOKEN, IGNORED)

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        guess, truth = zip(*self._named(predictions), strict=True)
        return self.task.score(guess, truth)

    def rows(self, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yields each sentence's words that have a token, with their tags."""
        named = zip(self._sentences(), self._named(predictions), strict=True)
        for index, (sentence, (guess, truth)) in enumerate(named):
            words = [sentence[number] for number in self._words.numbers[index]]
            yield {"id": index, "words": words, "prediction": guess, "target": truth}

    def _named(self, predictions: np.ndarray) -> Iterator[tuple[list[str], list[str]]]:
        """Yields the names of the predicted and of the right tags of each sentence."""
        labels = self.task.head.labels
        for index, row in enumerate(predictions.astype(np.int64)):
            truth = self._tags[index]
            yield [labels[tag] for tag in row[: len(truth)]], [labels[tag] for tag in truth]

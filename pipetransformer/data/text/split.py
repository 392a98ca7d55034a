"""Token sequences of different lengths, and splits made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.data.base import Digest, Split, TextFormat
from pipetransformer.data.tasks import Task
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

MIN_LENGTH = 8
CHUNK = 1000  # texts tokenised at once: the tokenizer's Python objects take far more memory than the ids


def beyond_the_model(max_length: int, wanted: TextFormat) -> tuple[str, ...]:
    """Returns the warning about ``dataset.max_length`` where it is more than the model reads, or none."""
    if max_length <= wanted.max_length:
        return ()
    most = wanted.max_length
    return (
        f"dataset.max_length={max_length} has no effect above {most}, the most tokens that this model reads: longer "
        "samples are cut off there; another model may have more positions",
    )


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one flat array.

    Attributes:
        values: All rows one after the other, shape (sum of lengths, ...).
        starts: Where each row starts, and the end of the last, shape (N + 1,).
    """

    values: np.ndarray
    starts: np.ndarray

    @staticmethod
    def of(rows: Iterable[Sequence[int] | np.ndarray]) -> Ragged:
        arrays = [np.asarray(row, dtype=np.int32) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
        return Ragged(values, np.cumsum([0, *map(len, arrays)]))

    @staticmethod
    def joined(parts: Sequence[Ragged]) -> Ragged:
        """Returns the rows of all parts in order."""
        lengths = [part.lengths for part in parts]
        values = np.concatenate([part.values for part in parts]) if parts else np.empty(0, dtype=np.int32)
        return Ragged(values, np.concatenate([[0], *lengths]).cumsum())

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.starts[row] : self.starts[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def padded(self, rows: np.ndarray, width: int, fill: int) -> np.ndarray:
        """Returns the rows (B,) of a flat array of numbers, filled up at the end to (B, width)."""
        assert self.lengths[rows].max(initial=0) <= width, (self.lengths[rows].max(), width)
        columns = np.arange(width)
        inside = columns < self.lengths[rows][:, None]
        flat = np.where(inside, self.starts[rows][:, None] + columns, 0)
        return np.where(inside, self.values[flat], fill)


@dataclass(frozen=True)
class Tokens:
    """Tokenised texts.

    Attributes:
        ids: Token ids, special tokens included.
        type_ids: For each token 0 or 1 for the text that it belongs to; ``None`` for tokenizers without.
        pad_id: The id that fills up short sequences.
        num_cut: Texts that were longer, of those that are cut off.
        longest: Tokens of the longest of them; 0 where there is none.
    """

    ids: Ragged
    type_ids: Ragged | None
    pad_id: int
    num_cut: int = 0
    longest: int = 0


class TextSplit(Split):
    """One split of token sequences, padded as far as each call asks."""

    def __init__(self, name: str, tokens: Tokens) -> None:
        if len(tokens.ids) == 0:
            raise UserError(f"the {name} split has no texts; check dataset.path")
        self.name = name
        self.lengths = tokens.ids.lengths
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens.ids)

    def identity(self) -> str:
        digest = Digest("tokens")
        for rows in (self.tokens.ids, self.tokens.type_ids):
            digest.add(*(None, None) if rows is None else (rows.starts, rows.values))
        digest.add(self.tokens.pad_id)
        return digest.hex()

    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        import torch

        rows = np.asarray(ids)
        padded = self.tokens.ids.padded(rows, self.width(rows, num_tokens), self.tokens.pad_id)
        return torch.from_numpy(padded.astype(np.int64))

    def context(self, ids: Sequence[int], num_tokens: int | None) -> dict[str, Tensor]:
        import torch

        rows = np.asarray(ids)
        width = self.width(rows, num_tokens)
        context = {"attention_mask": torch.from_numpy(np.arange(width) < self.tokens.ids.lengths[rows][:, None])}
        if self.tokens.type_ids is not None:
            type_ids = self.tokens.type_ids.padded(rows, width, 0)
            context["token_type_ids"] = torch.from_numpy(type_ids.astype(np.int64))
        return context

    def width(self, rows: np.ndarray, num_tokens: int | None) -> int:
        """Returns ``num_tokens``, or the length of the longest of the rows."""
        return int(self.tokens.ids.lengths[rows].max()) if num_tokens is None else num_tokens


class LabelledTexts(TextSplit):
    """Texts with classes (int64) or values (float64), shape (N,), or 1 and 0 for each class (int8), (N, C).

    Attributes:
        labels: The targets.
        task: Their task, which scores them.
    """

    def __init__(
        self, name: str, tokens: Tokens, labels: np.ndarray, task: Task, loss_weights: np.ndarray | None = None
    ) -> None:
        super().__init__(name, tokens)
        self.labels = labels
        self.task = task
        self.loss_weights = loss_weights

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        import torch

        return torch.from_numpy(self.labels[np.asarray(ids)])

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        return self.task.predict(outputs)

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        return self.task.score(predictions, self.labels)


def padding_id(tokenizer: Any) -> int:
    """Returns the id that fills up short samples: where there is none for padding, that of the end of a text.

    Any id would do, because layers see a mask over the padding and losses leave it out.

    Raises:
        UserError: The tokenizer is not a fast one, or has neither.
    """
    name = type(tokenizer).__name__
    if not tokenizer.is_fast:
        raise UserError(f"{name} is not a fast tokenizer; choose a model.name that has one")
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if pad_id is None:
        raise UserError(f"{name} has neither a padding nor an end token; choose a model.name whose tokenizer has one")
    return pad_id


def encode(texts: tuple[list[str], ...], tokenizer: Any, max_length: int) -> Tokens:
    """Tokenises texts or pairs of texts, the longer one of a pair cut first.

    Args:
        texts: One list of N texts, or two for pairs.
        tokenizer: A fast tokenizer of transformers.
        max_length: Tokens to keep, special tokens included.
    """
    firsts = range(0, len(texts[0]), CHUNK)
    return encode_batches((tuple(column[i : i + CHUNK] for column in texts) for i in firsts), tokenizer, max_length)


def encode_batches(batches: Iterable[tuple[list[str], ...]], tokenizer: Any, max_length: int) -> Tokens:
    """Tokenises texts as :func:`encode` does, batch by batch, so that only their tokens are ever whole in memory."""
    pad_id = padding_id(tokenizer)
    ids: list[Ragged] = []
    type_ids: list[Ragged] = []
    cut: list[int] = []
    for batch in batches:
        encoded = tokenizer(*batch, truncation=True, max_length=max_length, return_attention_mask=False)
        ids.append(Ragged.of(encoded["input_ids"]))
        if "token_type_ids" in encoded:
            type_ids.append(Ragged.of(encoded["token_type_ids"]))
        cut += _lengths_beyond(max_length, batch, np.flatnonzero(ids[-1].lengths >= max_length), tokenizer)
    return Tokens(
        Ragged.joined(ids), Ragged.joined(type_ids) if type_ids else None, pad_id, len(cut), max(cut, default=0)
    )


def _lengths_beyond(max_length: int, batch: tuple[list[str], ...], full: np.ndarray, tokenizer: Any) -> list[int]:
    """Returns the lengths of texts that have more tokens than are kept.

    Args:
        max_length: Tokens to keep.
        batch: Texts or pairs of texts.
        full: Numbers of those with as many tokens; only they are tokenised again, whole.
        tokenizer: A fast tokenizer of transformers.
    """
    if not len(full):
        return []
    texts = ([column[row] for row in full] for column in batch)
    whole = tokenizer(*texts, truncation=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [len(ids) for ids in whole if len(ids) > max_length]


def cut_off(split: TextSplit, max_length: int, wanted: TextFormat) -> tuple[str, ...]:
    """Returns the warning about texts that are longer than the samples of a split, or none.

    Args:
        split: The split.
        max_length: The option's value.
        wanted: Input of the model.
    """
    cut, can_rise = split.tokens.num_cut, max_length < wanted.max_length
    if not cut:
        return ()
    return (
        f"{cut} of {len(split)} texts of the {split.name} split have more than {min(max_length, wanted.max_length)} "
        f"tokens, the longest {split.tokens.longest}, and are cut off there; "
        + (f"raise dataset.max_length=, to {wanted.max_length} at most" if can_rise else "give shorter ones"),
    )


def check_tokens(tokens: Tokens, wanted: TextFormat, name: Callable[[int], str]) -> None:
    """Raises UserError where a sample has no tokens, or one that the model does not know.

    A tokenizer without special tokens makes none of an empty text.

    Args:
        tokens: The samples.
        wanted: Input of the model.
        name: Maps the index of a sample to its name in messages.
    """
    check_embedded(tokens, wanted)
    empty = np.flatnonzero(tokens.ids.lengths == 0)
    if len(empty):
        raise UserError(
            f"{len(empty)} texts have no tokens, the first is {name(int(empty[0]))}; remove them, or choose a "
            "model.name whose tokenizer adds special tokens"
        )


def check_embedded(tokens: Tokens, wanted: TextFormat) -> None:
    """Raises UserError where texts or their padding have a token beyond the model's word embeddings.

    A tokenizer may have more words than the model if no text holds them, as Gemma 3's has one for pictures.
    """
    if not wanted.vocab_size or max(wanted.tokenizer.get_vocab().values()) < wanted.vocab_size:
        return  # without a look at all tokens
    highest = max(tokens.pad_id, int(tokens.ids.values.max(initial=0)))
    if highest >= wanted.vocab_size:
        raise UserError(
            f"texts or their padding have the token {highest}, {wanted.tokenizer.convert_ids_to_tokens(highest)}, and "
            f"the model has word embeddings for {wanted.vocab_size}, from 0; save it once more after "
            "resize_token_embeddings(len(tokenizer)), or put its own tokenizer beside it"
        )

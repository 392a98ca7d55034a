"""Documents for a language model: their tokens, which of them it learns to predict, and the split made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.data.tasks import Task
from pipetransformer.data.text.split import Ragged, TextSplit, Tokens, padding_id
from pipetransformer.data.token_tasks import IGNORED, next_token_scores, token_sums
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Texts = tuple[list[str], list[str]]
"""Prompts, which are given, and what follows each of them and is learned."""


@dataclass
class Documents:
    """Tokenised documents.

    Attributes:
        tokens: The tokens of each sample: of a document, or of a piece of one.
        first: The first token that is learned of each sample, (N,), at least 1: the first of all follows nothing.
        num_cut: Documents of which only the first tokens are there.
        unlearned: Numbers of the documents without a token to learn, which are not among the samples.
    """

    tokens: Tokens
    first: np.ndarray
    num_cut: int
    unlearned: list[int]


def tokenize_documents(batches: Iterable[Texts], tokenizer: Any, max_length: int, splits: bool) -> Documents:
    """Tokenises documents, each with the token that ends a text.

    Prompt and completion are tokenised as one text; a token is learned where it ends within the completion.

    Args:
        batches: Documents, batch by batch.
        tokenizer: A fast tokenizer of transformers.
        max_length: Tokens of a sample at most.
        splits: Makes samples of that length, and a shorter last one, of a longer document; ``False`` cuts it off.

    Raises:
        UserError: The tokenizer has no token that ends a text.
    """
    pad_id = padding_id(tokenizer)
    ids, first, num_cut, number = [], [], 0, 0
    unlearned: list[int] = []
    for prompts, completions in batches:
        pieces: list[np.ndarray] = []
        for tokens, start in _encode(prompts, completions, tokenizer):
            num_cut += not splits and len(tokens) > max_length
            begins = range(0, len(tokens) if splits else 1, max_length)
            learned = [begin for begin in begins if max(start, begin + 1) < min(begin + max_length, len(tokens))]
            pieces += [tokens[begin : begin + max_length] for begin in learned]
            first += [max(1, start - begin) for begin in learned]
            unlearned += [] if learned else [number]
            number += 1
        ids.append(Ragged.of(pieces))
    return Documents(Tokens(Ragged.joined(ids), None, pad_id), np.array(first, dtype=np.int64), num_cut, unlearned)


def _encode(prompts: list[str], completions: list[str], tokenizer: Any) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the tokens of each document (T,), and the first that is learned."""
    end = tokenizer.eos_token_id
    if end is None:
        name = type(tokenizer).__name__
        raise UserError(f"{name} has no token that ends a text; choose a model.name whose tokenizer has one")
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    encoded = tokenizer(texts, return_attention_mask=False, return_offsets_mapping=True, verbose=False)
    for prompt, ids, offsets in zip(prompts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        tokens = np.array(ids if ids and ids[-1] == end else [*ids, end], dtype=np.int32)
        inside = np.flatnonzero(np.array(offsets).reshape(-1, 2)[:, 1] > len(prompt))
        learned = inside[0] if len(inside) else len(tokens) - 1  # at least that the text ends there
        yield tokens, int(learned) if prompt else 0


class DocumentSplit(TextSplit):
    """Documents, or pieces of them, each of which is a sample.

    Attributes:
        documents: Their tokens.
        task: The task, which scores them.
    """

    def __init__(self, name: str, documents: Documents, task: Task) -> None:
        super().__init__(name, documents.tokens)
        self.documents, self.task = documents, task
        self.loss_weights = (documents.tokens.ids.lengths - documents.first).astype(np.float64)

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        """Returns the token that follows each one (B, T), ``IGNORED`` where it is none or not learned."""
        import torch

        rows = np.asarray(ids)
        width = self.width(rows, num_tokens)
        tokens = self.tokens.ids.padded(rows, width, IGNORED)
        following = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
        is_learned = np.arange(1, width + 1) >= self.documents.first[rows][:, None]  # (B, T), of the token that follows
        return torch.from_numpy(np.where(is_learned, following, IGNORED).astype(np.int64))

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """Returns the sums of :func:`~pipetransformer.data.token_tasks.token_sums`, from logits (B, T, V)."""
        return token_sums(outputs, self.targets(ids, outputs.shape[1]).to(outputs.device))

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        return self.task.score(predictions, None)

    def rows(self, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yields the scores of each sample, and its number of tokens that are learned."""
        for index, sums in enumerate(predictions):
            yield {"id": index, **next_token_scores(sums[None]), "num_tokens": int(sums[2])}

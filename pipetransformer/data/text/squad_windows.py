"""Questions and their contexts as token sequences: a long context becomes several windows that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipetransformer.data.text.split import CHUNK, Ragged, Tokens, padding_id
from pipetransformer.errors import UserError

NULL_POSITION = 0  # the CLS token; the span [0, 0] says that the window holds no answer


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        id: The dataset's id.
        text: The question.
        context: The paragraph it is about.
        answers: Right answers; none when the context does not answer the question.
        starts: Where each answer starts in the context, in characters.
    """

    id: str
    text: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """The windows of some questions, in the order of the questions.

    Attributes:
        tokens: CLS, question, separator, a part of the context, separator.
        offsets: The characters [start, end) of each token in its text, rows of shape (T, 2).
        contexts: First and last token of the context, shape (N, 2); the last is before the first when there is none.
        questions: Index of each window's question, shape (N,).
    """

    tokens: Tokens
    offsets: Ragged
    contexts: np.ndarray
    questions: np.ndarray


def tokenize_windows(questions: Sequence[Question], tokenizer: Any, max_length: int, stride: int) -> Windows:
    """Tokenises questions with their contexts.

    Args:
        questions: The questions, at least one.
        tokenizer: A fast tokenizer of transformers.
        max_length: Tokens of a window at most.
        stride: Tokens of the context that neighbouring windows share.

    Raises:
        UserError: A question is so long that windows could not move on through the context.
    """
    pad_id = padding_id(tokenizer)
    ids, type_ids, offsets, contexts, owners = [], [], [], [], []
    for first in range(0, len(questions), CHUNK):
        chunk = questions[first : first + CHUNK]
        _check_room(chunk, tokenizer, max_length, stride)
        encoded = tokenizer(
            [question.text.strip() for question in chunk],
            [question.context for question in chunk],
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        ids += encoded["input_ids"]
        type_ids += encoded.get("token_type_ids", [])
        offsets += [np.array(pairs, dtype=np.int32) for pairs in encoded["offset_mapping"]]
        contexts += [_context_tokens(encoded.sequence_ids(row)) for row in range(len(encoded["input_ids"]))]
        owners += [first + row for row in encoded["overflow_to_sample_mapping"]]
    tokens = Tokens(Ragged.of(ids), Ragged.of(type_ids) if type_ids else None, pad_id)
    return Windows(tokens, Ragged(np.concatenate(offsets), tokens.ids.starts), np.array(contexts), np.array(owners))


def answer_tokens(offsets: np.ndarray, context: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """Finds the tokens of an answer in one window.

    Args:
        offsets: Characters of each token, shape (T, 2).
        context: First and last token of the context.
        start: First character of the answer, with no space around it.
        end: Character after its last one.

    Returns:
        First and last token, or the CLS token twice when the window does not hold the whole answer.
    """
    first, last = context
    starts, ends = offsets[first : last + 1].T
    if len(starts) == 0 or start < starts[0] or end > ends[-1]:
        return NULL_POSITION, NULL_POSITION
    first_token = int(np.searchsorted(ends, start, side="right"))
    last_token = int(np.searchsorted(starts, end, side="left")) - 1
    if first_token > last_token:  # the tokenizer dropped all of its characters
        return NULL_POSITION, NULL_POSITION
    return int(first) + first_token, int(first) + last_token


def _context_tokens(sequence_ids: list[int | None]) -> tuple[int, int]:
    tokens = [token for token, sequence in enumerate(sequence_ids) if sequence == 1]
    return (tokens[0], tokens[-1]) if tokens else (1, 0)


def _check_room(questions: Sequence[Question], tokenizer: Any, max_length: int, stride: int) -> None:
    texts = [question.text.strip() for question in questions]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    rooms = max_length - np.array(lengths) - tokenizer.num_special_tokens_to_add(pair=True)
    for index in map(int, np.argsort(rooms, kind="stable")):
        if rooms[index] > stride:
            return
        context = tokenizer(questions[index].context, add_special_tokens=False, verbose=False)["input_ids"]
        if len(context) <= rooms[index]:
            continue  # one window holds all of it
        raise UserError(
            f"question {questions[index].id} has {lengths[index]} tokens, which leaves {max(0, rooms[index])} of "
            f"{max_length} for the context; that must be more than dataset.stride={stride}: lower it, or raise "
            "dataset.max_length as far as the model allows, or shorten or remove the question"
        )

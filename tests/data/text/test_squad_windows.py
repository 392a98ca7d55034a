from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.data.text import squad_windows as windows_module
from pipetransformer.data.text.squad_windows import Question, answer_tokens, tokenize_windows

LONG = "it is a cat of it " * 12


def ask(context: str, text: str = "it?", name: str = "a") -> Question:
    return Question(name, text, context, (), ())


def test_a_short_context_is_one_window(tokenizer: Any) -> None:
    windows = tokenize_windows([ask("a cat")], tokenizer, 32, 4)
    assert tokenizer.decode(windows.tokens.ids[0]) == "[CLS] it? [SEP] a cat [SEP]"
    assert windows.contexts.tolist() == [[4, 7]]
    assert windows.offsets[0].tolist()[4:8] == [[0, 1], [2, 3], [3, 4], [4, 5]]
    assert windows.tokens.type_ids is not None
    assert windows.tokens.type_ids[0].tolist() == [0] * 4 + [1] * 5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10), st.integers(20, 60))
def test_windows_cover_the_context_and_overlap_by_the_stride(tokenizer: Any, stride: int, max_length: int) -> None:
    windows = tokenize_windows([ask(LONG)], tokenizer, max_length, stride)
    assert windows.tokens.ids.lengths.max() <= max_length
    spans = [windows.offsets[row][first : last + 1] for row, (first, last) in enumerate(windows.contexts)]
    whole = np.concatenate([spans[0], *(span[stride:] for span in spans[1:])])
    expected = tokenizer(LONG, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    assert whole.tolist() == [list(pair) for pair in expected]


def test_windows_stand_in_the_order_of_their_questions(tokenizer: Any) -> None:
    windows = tokenize_windows([ask("a"), ask(LONG), ask("of it")], tokenizer, 40, 5)
    assert windows.questions.tolist() == sorted(windows.questions.tolist())
    assert {*windows.questions.tolist()} == {0, 1, 2}
    assert (windows.questions == 1).sum() > 1


def test_chunks_are_joined_in_order(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [ask("a"), ask(LONG), ask("of it"), ask("it is"), ask(LONG)]
    at_once = tokenize_windows(questions, tokenizer, 40, 5)
    monkeypatch.setattr(windows_module, "CHUNK", 2)
    in_chunks = tokenize_windows(questions, tokenizer, 40, 5)
    np.testing.assert_array_equal(in_chunks.questions, at_once.questions)
    np.testing.assert_array_equal(in_chunks.contexts, at_once.contexts)
    np.testing.assert_array_equal(in_chunks.offsets.values, at_once.offsets.values)
    np.testing.assert_array_equal(in_chunks.tokens.ids.values, at_once.tokens.ids.values)
    assert in_chunks.tokens.type_ids is not None
    np.testing.assert_array_equal(in_chunks.tokens.type_ids.starts, at_once.tokens.ids.starts)


def test_a_question_that_leaves_no_room_is_named(tokenizer: Any) -> None:
    questions = [ask("a cat"), ask("a cat " * 3, text="it is " * 10, name="long")]
    with pytest.raises(ValueError, match=r"question long has 20 tokens, which leaves 9 of 32 .* dataset\.stride=9"):
        tokenize_windows(questions, tokenizer, 32, 9)
    assert {*tokenize_windows(questions, tokenizer, 32, 8).questions} == {0, 1}
    questions[1] = ask("a cat", text="it is " * 10, name="long")
    assert len(tokenize_windows(questions, tokenizer, 32, 8).questions) == 2


def test_a_long_question_whose_context_fits_beside_it_is_one_window(tokenizer: Any) -> None:
    questions = [ask("a cat"), ask("a cat", text="it is " * 10)]
    assert tokenize_windows(questions, tokenizer, 32, 16).questions.tolist() == [0, 1]


OFFSETS = np.array([(0, 0), (0, 2), (0, 0), (10, 13), (14, 18), (18, 20), (21, 25), (0, 0)])
CONTEXT = np.array([3, 6])


@pytest.mark.parametrize(
    ("start", "end", "tokens"),
    [
        (14, 18, (4, 4)),
        (10, 25, (3, 6)),
        (15, 19, (4, 5)),  # within tokens: the whole tokens
        (9, 13, (0, 0)),  # starts before the window
        (21, 26, (0, 0)),  # ends after it
        (13, 14, (0, 0)),  # a space, which no token covers
    ],
)
def test_an_answer_is_found_among_the_tokens(start: int, end: int, tokens: tuple[int, int]) -> None:
    assert answer_tokens(OFFSETS, CONTEXT, start, end) == tokens


def test_a_window_without_context_holds_no_answer() -> None:
    assert answer_tokens(OFFSETS, np.array([1, 0]), 0, 2) == (0, 0)

"""Scores of hand-made predictions on one short and one long context."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.data.base import TextFormat
from pipetransformer.data.tasks import answer_scores
from pipetransformer.data.text.squad_split import NUM_SPANS, SquadSplit, best_spans
from pipetransformer.data.text.squad_windows import Question, tokenize_windows

SHORT = "a cat is it"
LONG = "of a " * 20 + "dog  is it"
Make = Callable[..., SquadSplit]


@pytest.fixture(scope="module")
def make(text: TextFormat) -> Make:
    def make_split(*questions: Question, version_2: bool = False, max_answer_length: int = 30) -> SquadSplit:
        windows = tokenize_windows(questions, text.tokenizer, 32, 8)
        return SquadSplit("dev", questions, windows, max_answer_length, version_2)

    return make_split


def ask(context: str, *answers: str) -> Question:
    return Question("q", "it?", context, answers, tuple(context.index(answer) for answer in answers))


def gold(split: SquadSplit) -> np.ndarray:
    """Predicts the right span of each window with score 1, shape (N, 1, 3)."""
    spans = split.targets(range(len(split)))[:, :2].numpy()
    return np.concatenate([spans, np.ones((len(split), 1))], axis=1)[:, None]


@pytest.mark.parametrize(
    ("answer", "right", "f1", "exact"),
    [
        ("", ["cat", "the"], 0.0, 0.0),  # an article alone is no answer
        ("An", ["the"], 1.0, 1.0),  # and none of the right ones leaves the question without
        ("", [], 1.0, 1.0),
        ("The cat!", ["cat"], 1.0, 1.0),
        ("black cat", ["?", "a cat"], 2 / 3, 0.0),
    ],
)
def test_answers_are_scored_as_by_the_official_script(answer: str, right: list[str], f1: float, exact: float) -> None:
    assert answer_scores([answer], [right]) == pytest.approx({"f1": f1, "exact_match": exact})


def test_right_spans_score_one_and_empty_ones_zero(make: Make) -> None:
    split = make(ask(SHORT, "cat"), ask(LONG, "dog"))
    assert len(split) > 2
    assert split.answers(gold(split)) == ["cat", "dog"]
    assert split.score(gold(split)) == {"f1": 1.0, "exact_match": 1.0}
    assert split.score(np.zeros((len(split), 1, 3))) == {"f1": 0.0, "exact_match": 0.0}


def test_the_best_of_several_right_answers_counts(make: Make) -> None:
    split = make(ask(SHORT, "cat is", "is it"))
    # The tokens: [CLS] it ? [SEP] a c ##a ##t is it [SEP]
    assert split.score(np.array([[[8, 9, 1.0]]])) == {"f1": 1.0, "exact_match": 1.0}
    assert split.score(np.array([[[8, 8, 1.0]]])) == pytest.approx({"f1": 2 / 3, "exact_match": 0.0})


def test_questions_with_the_same_id_are_both_counted(make: Make) -> None:
    split = make(ask(SHORT, "cat"), ask(SHORT, "is"))
    one_right = gold(split)
    one_right[1] = one_right[0]
    assert split.score(one_right)["exact_match"] == 0.5


def test_spaces_around_an_answer_do_no_harm(make: Make) -> None:
    split = make(ask(LONG, " dog  "))
    assert split.answers(gold(split)) == ["dog"]


def test_windows_without_the_answer_point_to_cls(make: Make) -> None:
    split = make(ask(LONG, "dog"))
    spans = split.targets(range(len(split)))[:, :2]
    assert spans[0].tolist() == [0, 0]
    assert (spans.sum(1) > 0).any()


def test_the_best_window_answers(make: Make) -> None:
    split = make(ask(LONG, "dog"))
    predictions = gold(split)
    answered = predictions[:, 0, 0] > 0
    predictions[~answered] = [[4, 4, 0.5]]  # the first token of the context, less likely
    assert split.answers(predictions) == ["dog"]
    predictions[~answered] = [[4, 4, 1.5]]
    assert split.answers(predictions) == ["of"]


@pytest.mark.parametrize("span", [(2, 2), (1, 5), (5, 4), (4, 8), (10, 10), (0, 4)])
def test_spans_outside_the_context_reversed_or_too_long_never_answer(make: Make, span: tuple[int, int]) -> None:
    split = make(ask(SHORT, "cat"), max_answer_length=4)
    assert split.answers(np.array([[[*span, 9.0], [4, 4, 1.0]]])) == ["a"]


def test_scores_that_are_not_finite_never_answer(make: Make) -> None:
    split = make(ask(SHORT, "cat"))
    for score in (-np.inf, np.nan):
        assert split.answers(np.array([[[4, 4, score]]])) == [""]


@pytest.mark.parametrize(("null", "expected"), [(2.0, ""), (1.0, "a"), (0.5, "a")])
def test_with_version_2_the_null_span_competes(make: Make, null: float, expected: str) -> None:
    split = make(ask(SHORT), version_2=True)
    assert split.answers(np.array([[[0, 0, null], [4, 4, 1.0]]])) == [expected]


def test_with_version_2_one_sure_window_is_enough(make: Make) -> None:
    split = make(ask(LONG, "dog"), version_2=True)
    predictions = np.tile([[0, 0, 9.0], [4, 4, 1.0]], (len(split), 1, 1))
    assert split.answers(predictions) == [""]
    predictions[-1, 0] = [5, 5, 0.0]  # here no null span made it into the best
    assert split.answers(predictions) != [""]


def test_an_empty_answer_is_right_where_there_is_none(make: Make) -> None:
    split = make(ask(SHORT), ask(SHORT, "cat"), version_2=True)
    assert split.score(gold(split)) == {"f1": 1.0, "exact_match": 1.0}
    assert split.score(np.zeros((2, 1, 3))) == {"f1": 0.5, "exact_match": 0.5}


def test_answers_may_start_in_the_context_or_at_cls(make: Make) -> None:
    mask = make(ask(SHORT, "cat"), ask("a", "a")).answer_mask([1, 0], 12)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]]


def test_logits_become_answers(make: Make) -> None:
    split = make(ask(SHORT, "cat"), ask("of a", "a"))
    logits = torch.zeros(2, 12, 2)
    for row, (start, end) in enumerate(split.targets([0, 1])[:, :2].tolist()):
        logits[row, start, 0] = logits[row, end, 1] = 3
        logits[row, 2] = 9  # a token of the question
    predictions = split.predict(logits, [0, 1], 12)
    assert predictions.shape == (2, NUM_SPANS, 3)
    assert split.score(predictions.numpy()) == {"f1": 1.0, "exact_match": 1.0}


def brute_force(logits: torch.Tensor, allowed: torch.Tensor, max_answer_length: int) -> list[list[float]]:
    """All spans of one window by falling score."""
    num_tokens = len(logits)
    pairs = [(start, end) for start in range(num_tokens) for end in range(start, num_tokens)]
    spans = [
        [start, end, (logits[start, 0] + logits[end, 1]).item()]
        for start, end in pairs
        if allowed[start] and allowed[end] and end - start < max_answer_length and (start > 0 or end == 0)
    ]
    return sorted(spans, key=lambda span: -span[2])


@given(
    st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 9), st.integers(1, 12), st.integers(2, 60), st.booleans()
)
def test_the_best_spans_are_those_of_an_exhaustive_search(
    seed: int, batch: int, num_tokens: int, max_answer_length: int, k: int, masked: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, num_tokens, 2, generator=generator, dtype=torch.float64)
    allowed = torch.rand(batch, num_tokens, generator=generator) < (0.5 if masked else 1.0)
    found = best_spans(logits, allowed, max_answer_length, k)
    assert found.shape == (batch, k, 3)
    for row in range(batch):
        expected = brute_force(logits[row], allowed[row], max_answer_length)[:k]
        assert found[row, : len(expected)].tolist() == expected
        assert (found[row, len(expected) :, 2] == -torch.inf).all()


def test_positions_survive_half_precision() -> None:
    logits = torch.zeros(1, 400, 2, dtype=torch.bfloat16)
    logits[0, 301, 0] = logits[0, 303, 1] = 5
    found = best_spans(logits, torch.ones(1, 400, dtype=torch.bool), 30, 2)
    assert found.dtype == torch.float32
    assert found[0, 0].tolist() == pytest.approx([301, 303, 10])

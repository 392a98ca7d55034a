"""Windows over contexts as a split, and the answers that its predictions stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.data.tasks import question_answering
from pipetransformer.data.text.split import TextSplit
from pipetransformer.data.text.squad_windows import NULL_POSITION, Question, Windows, answer_tokens
from pipetransformer.data.unlabelled import ScoredSplit

if TYPE_CHECKING:
    from torch import Tensor

NUM_SPANS = 20  # kept of each window


class SquadSplit(TextSplit):
    """Windows over the contexts of some questions; a sample is a window, a score counts questions.

    Attributes:
        questions: The questions.
        max_answer_length: Tokens of an answer at most.
    """

    def __init__(
        self, name: str, questions: Sequence[Question], windows: Windows, max_answer_length: int, version_2: bool
    ) -> None:
        super().__init__(name, windows.tokens)
        self.questions = questions
        self.max_answer_length = max_answer_length
        self.task = question_answering()
        self._windows = windows
        self._version_2 = version_2
        gold = [self._gold(row) for row in range(len(self))]
        spans = np.array(gold, dtype=np.int64).reshape(-1, 2)
        self._targets = np.concatenate([spans, windows.tokens.ids.lengths[:, None]], axis=1)

    @property
    def num_scored(self) -> int:
        return len(self.questions)

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        import torch

        return torch.from_numpy(self._targets[np.asarray(ids)])

    def answer_mask(self, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """Marks the tokens that may start or end an answer: the context's and CLS, (B, T) of bool."""
        import torch

        rows = np.asarray(ids)
        first, last = self._windows.contexts[rows].T[:, :, None]  # each (B, 1)
        columns = np.arange(self.width(rows, num_tokens))
        return torch.from_numpy((columns == NULL_POSITION) | ((columns >= first) & (columns <= last)))

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """Returns the best spans of each window, shape (B, NUM_SPANS, 3), from logits (B, T, 2)."""
        allowed = self.answer_mask(ids, num_tokens).to(outputs.device)
        return best_spans(outputs, allowed, self.max_answer_length, NUM_SPANS)

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        right = [question.answers for question in self.questions]
        return self.task.score(self.answers(predictions), right)

    def rows(self, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yields the answer to each question beside the right ones."""
        for question, answer in zip(self.questions, self.answers(predictions), strict=True):
            yield {"id": question.id, "prediction": answer, "target": list(question.answers)}

    def answers(self, predictions: np.ndarray) -> list[str]:
        """Returns the text that answers each question, best over its windows; empty for none.

        With version 2 the empty answer wins when the null span scores higher in *every* window than the best span in
        any, as in the official script at threshold 0. A null span that is not among a window's predictions scored
        less than an answer there.

        Args:
            predictions: Best spans of each window, shape (N, k, 3): [start, end, score].
        """
        assert predictions.shape[::2] == (len(self), 3), predictions.shape
        spans, scores = predictions[..., :2].astype(np.int64), predictions[..., 2]
        null = (spans == NULL_POSITION).all(-1)
        null_scores = np.where(null, scores, -np.inf).max(1)  # (N,)
        answer_scores = np.where(self._is_answer(spans), scores, -np.inf)  # (N, k)
        best = answer_scores.argmax(1)
        best_scores = answer_scores.max(1)
        texts = []
        for rows in self._rows_of_questions():
            row = int(rows[best_scores[rows].argmax()])
            unanswered = self._version_2 and null_scores[rows].min() > best_scores[row]
            found = np.isfinite(best_scores[row]) and not unanswered
            texts.append(self._text(row, *spans[row, best[row]]) if found else "")
        return texts

    def _is_answer(self, spans: np.ndarray) -> np.ndarray:
        """Marks the spans (N, k, 2) that lie in the context and are neither reversed nor too long, shape (N, k)."""
        first, last = self._windows.contexts.T[:, :, None]  # each (N, 1)
        start, end = spans[..., 0], spans[..., 1]
        return (first <= start) & (start <= end) & (end <= last) & (end - start < self.max_answer_length)

    def _rows_of_questions(self) -> list[np.ndarray]:
        """Returns the windows of each question, which are neighbours."""
        changes = np.flatnonzero(np.diff(self._windows.questions)) + 1
        return np.split(np.arange(len(self)), changes)

    def _text(self, row: int, start: int, end: int) -> str:
        offsets = self._windows.offsets[row]
        context = self.questions[self._windows.questions[row]].context
        return context[offsets[start, 0] : offsets[end, 1]]

    def _gold(self, row: int) -> tuple[int, int]:
        """Returns the first and last token of the first right answer."""
        question = self.questions[self._windows.questions[row]]
        if not question.answers:
            return NULL_POSITION, NULL_POSITION
        answer, start = question.answers[0], question.starts[0]
        start += len(answer) - len(answer.lstrip())  # tokens do not cover the spaces around an answer
        return answer_tokens(
            self._windows.offsets[row], self._windows.contexts[row], start, start + len(answer.strip())
        )


class AnsweredSplit(ScoredSplit):
    """Questions without known answers; a row of its predictions is an answer."""

    def __init__(self, split: SquadSplit) -> None:
        super().__init__(split, [{}] * len(split), ())
        self._questions = split

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        return self._questions.predict(outputs, ids, num_tokens)

    def rows(self, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yields the answer to each question, empty for none."""
        for question, answer in zip(self._questions.questions, self._questions.answers(predictions), strict=True):
            yield {"id": question.id, "prediction": answer}


def best_spans(logits: Tensor, allowed: Tensor, max_answer_length: int, k: int) -> Tensor:
    """Returns the ``k`` best spans by the sum of their start and end logit.

    A span runs forward over at most ``max_answer_length`` tokens. The CLS token pairs only with itself.

    Args:
        logits: Start and end logit of each token, shape (B, T, 2).
        allowed: Tokens that may start or end an answer, shape (B, T) of bool.
        max_answer_length: Tokens of an answer at most.
        k: Spans to return; at least 2, so that a real answer always stands beside the null answer.

    Returns:
        Shape (B, k, 3), float32 or wider: [start, end, score], best first; score -inf where there are fewer than ``k``.
    """
    import torch
    from torch.nn.functional import pad

    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    starts, ends = wide.masked_fill(~allowed[..., None], -torch.inf).unbind(-1)  # each (B, T)
    num_tokens = starts.shape[1]
    length = min(max_answer_length, num_tokens)
    # windows[b, s, d] is the logit of ending at token s + d
    windows = pad(ends, (0, length - 1), value=-torch.inf).unfold(1, length, 1)
    scores = starts[:, :, None] + windows  # (B, T, length)
    scores[:, NULL_POSITION, 1:] = -torch.inf
    flat = pad(scores.flatten(1), (0, max(0, k - num_tokens * length)), value=-torch.inf)
    score, index = flat.topk(k, dim=1)
    start = index // length
    return torch.stack([start.to(score), (start + index % length).to(score), score], dim=-1)

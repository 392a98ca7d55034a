"""Windows over contexts as a split, and the answers that predictions for them stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipetransformer.data.spans import NULL_POSITION, best_spans
from pipetransformer.data.squad_file import Question
from pipetransformer.data.text import TextSplit
from pipetransformer.data.windows import Windows, answer_tokens

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
        self._windows = windows
        self._version_2 = version_2
        gold = [self._gold(row) for row in range(len(self))]
        spans = np.array(gold, dtype=np.int64).reshape(-1, 2)
        self._targets = np.concatenate([spans, windows.tokens.ids.lengths[:, None]], axis=1)

    @property
    def num_scored(self) -> int:
        return len(self.questions)

    def targets(self, ids: Sequence[int]) -> Tensor:
        import torch

        return torch.from_numpy(self._targets[np.asarray(ids)])

    def answer_mask(self, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """Tokens that may start or end an answer: the context's and CLS, shape (B, T) of bool."""
        import torch

        rows = np.asarray(ids)
        first, last = self._windows.contexts[rows].T[:, :, None]  # each (B, 1)
        columns = np.arange(self.width(rows, num_tokens))
        return torch.from_numpy((columns == NULL_POSITION) | ((columns >= first) & (columns <= last)))

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """The best spans of each window, shape (B, NUM_SPANS, 3), from logits (B, T, 2)."""
        allowed = self.answer_mask(ids, num_tokens).to(outputs.device)
        return best_spans(outputs, allowed, self.max_answer_length, NUM_SPANS)

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        from torchmetrics.functional.text import squad

        answers = self.answers(predictions)
        # Numbered here, because files may use an id twice. No right answer at all counts as the empty text.
        targets = [
            {"id": str(row), "answers": {"text": list(question.answers) or [""], "answer_start": list(question.starts)}}
            for row, question in enumerate(self.questions)
        ]
        percent = squad([{"id": str(row), "prediction_text": text} for row, text in enumerate(answers)], targets)
        return {name: float(percent[name]) / 100 for name in ("f1", "exact_match")}

    def answers(self, predictions: np.ndarray) -> list[str]:
        """The text that answers each question, best over its windows; empty for none.

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
        """Which spans (N, k, 2) lie in the context and are neither reversed nor too long, shape (N, k)."""
        first, last = self._windows.contexts.T[:, :, None]  # each (N, 1)
        start, end = spans[..., 0], spans[..., 1]
        return (first <= start) & (start <= end) & (end <= last) & (end - start < self.max_answer_length)

    def _rows_of_questions(self) -> list[np.ndarray]:
        """The windows of each question; they stand next to each other."""
        changes = np.flatnonzero(np.diff(self._windows.questions)) + 1
        return np.split(np.arange(len(self)), changes)

    def _text(self, row: int, start: int, end: int) -> str:
        offsets = self._windows.offsets[row]
        context = self.questions[self._windows.questions[row]].context
        return context[offsets[start, 0] : offsets[end, 1]]

    def _gold(self, row: int) -> tuple[int, int]:
        """Tokens of the first right answer."""
        question = self.questions[self._windows.questions[row]]
        if not question.answers:
            return NULL_POSITION, NULL_POSITION
        answer, start = question.answers[0], question.starts[0]
        start += len(answer) - len(answer.lstrip())  # tokens do not cover the spaces around an answer
        return answer_tokens(
            self._windows.offsets[row], self._windows.contexts[row], start, start + len(answer.strip())
        )

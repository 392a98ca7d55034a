"""The tasks that a model can be trained for: head, loss, prediction and metrics of each in one value.

A new task is one :class:`Task`; the runtime, the evaluation and the models take all they need to know from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.models.base import Head

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


def likeliest(output: Tensor) -> Tensor:
    """Returns the index of the highest of the last dimension, (B, ..., C) -> (B, ...)."""
    return output.argmax(-1)


@dataclass(frozen=True)
class Task:
    """Objective of a training run, from the head of the model to its metrics.

    Attributes:
        name: For reports.
        head: What the model's last layer has to be.
        loss: Loss of each sample, ``loss(output, targets) -> (B,)``. It may depend neither on the other samples nor
            on how far the batch is padded. Targets of any type arrive as float64.
        output_shape: Maps the shape (B, T, D) between layers to that of the head's output.
        score: Metrics from predictions and targets of all samples, the main one first; 1 is perfect.
        predict: Maps outputs (B, ...) to what ``score`` compares with the targets.
    """

    name: str
    head: Head
    loss: Callable[[Tensor, Tensor], Tensor]
    output_shape: Callable[[Shape], Shape]
    score: Callable[[Any, Any], dict[str, float]]
    predict: Callable[[Tensor], Tensor] = likeliest


def text_classification(
    num_classes: int, labels: tuple[str, ...] = (), metrics: tuple[str, ...] = ("accuracy",)
) -> Task:
    """Returns the task of one class per text; targets (B,) are numbers of classes."""
    return _classification(Head("sequence", num_classes, labels, "single_label_classification"), metrics)


def image_classification(num_classes: int, labels: tuple[str, ...] = ()) -> Task:
    """Returns the task of one class per image, scored by accuracy; targets (B,) are numbers of classes."""
    return _classification(Head("image", num_classes, labels), ("accuracy",))


def _classification(head: Head, metrics: tuple[str, ...]) -> Task:
    return Task(
        "classification",
        head,
        cross_entropy,
        partial(_one_per_sample, head.num_outputs),
        partial(compute_metrics, metrics),
    )


def regression(metrics: tuple[str, ...] = ("pearson", "spearman")) -> Task:
    """Returns the task of one value per text; targets (B,) are values."""
    return Task(
        "regression",
        Head("sequence", 1, problem_type="regression"),
        squared_error,
        partial(_one_per_sample, 1),
        partial(compute_metrics, metrics),
        _only_output,
    )


def question_answering() -> Task:
    """Returns the task of finding an answer in a context: targets (B, 3) are [start, end, number of tokens].

    It scores texts (N) against the right answers of each question.
    """
    return Task("question_answering", Head("span", 2), span_cross_entropy, _start_and_end, answer_scores)


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy of each sample from logits (B, C) and classes (B,)."""
    from torch.nn import functional

    return functional.cross_entropy(output, targets.long(), reduction="none")


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    """Returns the squared error of each sample from values (B, 1) and targets (B,)."""
    from torch.nn import functional

    return functional.mse_loss(output.squeeze(1), targets.to(output.dtype), reduction="none")


def span_cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of the cross-entropies of start and end from logits (B, T, 2) and targets (B, 3).

    Padding takes no part in the softmax, so that the loss of a sample depends neither on its batch nor on the cache.
    """
    import torch
    from torch.nn import functional

    padding = torch.arange(output.shape[1], device=output.device) >= targets[:, 2:]  # (B, T)
    logits = output.masked_fill(padding[:, :, None], -math.inf)
    start, end = (functional.cross_entropy(logits[:, :, i], targets[:, i].long(), reduction="none") for i in (0, 1))
    return (start + end) / 2


def compute_metrics(names: tuple[str, ...], predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Computes the named metrics in order, over all samples at once.

    Args:
        names: Of ``accuracy``, ``f1`` (of class 1), and the correlations ``matthews``, ``pearson`` and ``spearman``,
            which are 0 where all predictions or all targets are equal.
        predictions: Classes or values, shape (N,).
        targets: The same for the truth, shape (N,).
    """
    from scipy import stats
    from sklearn import metrics

    assert predictions.shape == targets.shape, (predictions.shape, targets.shape)
    functions: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda truth, guess: metrics.f1_score(truth, guess, zero_division=0.0),  # type: ignore[arg-type]
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda truth, guess: stats.pearsonr(truth, guess).statistic,
        "spearman": lambda truth, guess: stats.spearmanr(truth, guess).statistic,
    }
    values = targets.astype(np.float64), predictions.astype(np.float64)
    is_constant = min(len(np.unique(each)) for each in values) == 1
    zero = {"matthews", "pearson", "spearman"} if is_constant else {}
    return {name: 0.0 if name in zero else float(functions[name](*values)) for name in names}


def answer_scores(answers: Sequence[str], right: Sequence[Sequence[str]]) -> dict[str, float]:
    """Computes F1 and exact match as SQuAD's official script does, 1 is perfect.

    Args:
        answers: The answer to each of N questions, empty for none.
        right: The answers that count as right, none where the context has no answer.
    """
    from torchmetrics.functional.text import squad

    # numbered here, because files may use an id twice; no right answer at all counts as the empty text
    given = [{"id": str(row), "prediction_text": text} for row, text in enumerate(answers)]
    wanted = [
        {"id": str(row), "answers": {"text": list(texts) or [""], "answer_start": [0]}}
        for row, texts in enumerate(right)
    ]
    percent = squad(given, wanted)
    return {name: float(percent[name]) / 100 for name in ("f1", "exact_match")}


def _one_per_sample(num_outputs: int, hidden: Shape) -> Shape:
    return (hidden[0], num_outputs)


def _start_and_end(hidden: Shape) -> Shape:
    return (*hidden[:2], 2)


def _only_output(output: Tensor) -> Tensor:
    return output.squeeze(1)

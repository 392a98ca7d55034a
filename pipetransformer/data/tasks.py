"""The tasks that a model can be trained for: head, loss, prediction and metrics of each in one value.

A new task is one :class:`Task`; the runtime, the evaluation and the models take all they need to know from it.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.errors import UserError
from pipetransformer.models.base import Head

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shape = tuple[int, ...]
MULTI_LABEL = "multi_label_classification"  # the problem type of a head
MULTI_LABEL_METRICS = ("micro_f1", "macro_f1", "subset_accuracy")
ERRORS = ("mse", "mae")  # metrics of which less is better, so that none is the main one
METRICS = {  # for each kind of targets those that there are
    "classification": ("accuracy", "macro_f1", "micro_f1", "f1", "matthews"),
    "multi_label": MULTI_LABEL_METRICS,
    "regression": ("pearson", "spearman", *ERRORS),
}
ANSWER_METRICS = ("f1", "exact_match")


def likeliest(output: Tensor) -> Tensor:
    """Returns the index of the highest of the last dimension, (B, ..., C) -> (B, ...)."""
    return output.argmax(-1)


def check_losses(losses: Tensor, num_samples: int) -> None:
    """Refuses a loss that is not one number per sample (B,): a mean would count the samples that fill a batch up.

    Raises:
        UserError: With the shape and the remedy.
    """
    if not hasattr(losses, "shape"):
        raise UserError(
            f"the loss is a value of type {type(losses).__name__}; return a tensor with one number per sample"
        )
    if tuple(losses.shape) != (num_samples,):
        raise UserError(
            f"the loss has shape {tuple(losses.shape)} for {num_samples} samples; return one number per sample, as "
            'torch\'s losses do with reduction="none"'
        )


@dataclass(frozen=True)
class Task:
    """Objective of a training run, from the head of the model to its metrics.

    Attributes:
        name: For reports.
        head: What the model's last layer has to be.
        loss: Loss of each sample, ``loss(output, targets) -> (B,)``. It may depend neither on the other samples nor
            on how far the batch is padded. Targets of any type arrive as float64.
        output_shape: Maps the shape (B, T, D) between layers to that of the head's output.
        score: Metrics from predictions and targets of all samples, the main one first. Of losses and errors less is
            better, as their names tell (:func:`pipetransformer.metric.sign_of`), of others more, and 1 is perfect.
        predict: Maps outputs (B, ...) to what ``score`` compares with the targets.
        metrics: Names of the metrics, the main one first; empty where only ``score`` knows.
    """

    name: str
    head: Head
    loss: Callable[[Tensor, Tensor], Tensor]
    output_shape: Callable[[Shape], Shape]
    score: Callable[[Any, Any], dict[str, float]]
    predict: Callable[[Tensor], Tensor] = likeliest
    metrics: tuple[str, ...] = ()


def text_classification(
    num_classes: int, labels: tuple[str, ...] = (), metrics: tuple[str, ...] = ("accuracy",),
    class_weights: tuple[float, ...] = (), label_smoothing: float = 0.0,
) -> Task:  # fmt: skip
    """Returns the task of one class per text; targets (B,) are numbers of classes.

    Args:
        num_classes: Classes.
        labels: Their names.
        metrics: Names for :func:`compute_metrics`.
        class_weights: Factor of the loss of each class; none: 1 each. The weights of the samples' classes have to be
            the split's ``loss_weights``, so that the loss of a global batch is torch's weighted mean.
        label_smoothing: See :class:`torch.nn.CrossEntropyLoss`.
    """
    task = _classification(Head("sequence", num_classes, labels, "single_label_classification"), metrics)
    if not class_weights and not label_smoothing:
        return task
    loss = partial(cross_entropy, class_weights=class_weights, label_smoothing=label_smoothing)
    return replace(task, loss=loss)


def multi_label_classification(
    num_classes: int, labels: tuple[str, ...] = (), metrics: tuple[str, ...] = MULTI_LABEL_METRICS
) -> Task:
    """Returns the task of any number of classes per text; targets (B, num_classes) are 1 or 0 for each."""
    return Task(
        "multi_label_classification",
        Head("sequence", num_classes, labels, MULTI_LABEL),
        binary_cross_entropy,
        partial(_one_per_sample, num_classes),
        partial(compute_metrics, metrics),
        _above_one_half,
        metrics,
    )


def image_classification(num_classes: int, labels: tuple[str, ...] = (), label_smoothing: float = 0.0) -> Task:
    """Returns the task of one class per image, scored by accuracy; targets (B,) are numbers of classes."""
    task = _classification(Head("image", num_classes, labels), ("accuracy",))
    return replace(task, loss=partial(cross_entropy, label_smoothing=label_smoothing)) if label_smoothing else task


def _classification(head: Head, metrics: tuple[str, ...]) -> Task:
    return Task(
        "classification",
        head,
        cross_entropy,
        partial(_one_per_sample, head.num_outputs),
        partial(compute_metrics, metrics),
        metrics=metrics,
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
        metrics,
    )


def question_answering() -> Task:
    """Returns the task of finding an answer in a context: targets (B, 3) are [start, end, number of tokens].

    It scores texts (N) against the right answers of each question.
    """
    return Task(
        "question_answering", Head("span", 2), span_cross_entropy, _start_and_end, answer_scores, metrics=ANSWER_METRICS
    )


def cross_entropy(
    output: Tensor, targets: Tensor, class_weights: tuple[float, ...] = (), label_smoothing: float = 0.0
) -> Tensor:
    """Returns the cross-entropy of each sample from logits (B, C), times the weight of its class.

    Targets are classes (B,), or where samples are mixed their probabilities (B, C).
    """
    from torch.nn import functional

    weight = _on_device(class_weights, output.dtype, output.device) if class_weights else None
    wanted = targets.long() if targets.ndim == 1 else targets.to(output.dtype)
    return functional.cross_entropy(output, wanted, weight, reduction="none", label_smoothing=label_smoothing)


@lru_cache(maxsize=16)
def _on_device(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns numbers (N,) on a device; copied once, because the host would wait for each copy."""
    import torch

    with torch.inference_mode(False):  # a first evaluation may be in it, and training goes on with the same tensor
        return torch.tensor(numbers, dtype=dtype, device=device)


def binary_cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean over the classes for each sample, from logits and targets (B, C)."""
    from torch.nn import functional

    wanted = targets.to(output.dtype).reshape(output.shape)  # one class comes as (B,)
    return functional.binary_cross_entropy_with_logits(output, wanted, reduction="none").mean(1)


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
        names: Of :data:`METRICS`: ``f1`` is that of class 1, ``macro_f1`` the mean over the classes that occur, or over
            all where a sample has several. The correlations ``matthews``, ``pearson`` and ``spearman`` are 0 where all
            predictions or all targets are equal. ``mse`` and ``mae`` are errors, and 0 is perfect.
        predictions: Classes or values, shape (N,), or 1 and 0 for each class, (N, C). Every metric is NaN where one of
            them is not finite.
        targets: The same for the truth.
    """
    from scipy import stats
    from sklearn import metrics

    assert predictions.shape == targets.shape, (predictions.shape, targets.shape)

    def f1(truth: np.ndarray, guess: np.ndarray, average: str) -> float:
        if truth.ndim > 1 and truth.shape[1] == 1:  # sklearn would take yes and no for two classes
            truth, guess, average = truth[:, 0], guess[:, 0], "binary"
        return metrics.f1_score(truth, guess, average=average, zero_division=0.0)  # type: ignore[arg-type]

    functions: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
        "accuracy": metrics.accuracy_score,
        "subset_accuracy": metrics.accuracy_score,
        "f1": partial(f1, average="binary"),
        "macro_f1": partial(f1, average="macro"),
        "micro_f1": partial(f1, average="micro"),
        "mse": metrics.mean_squared_error,
        "mae": metrics.mean_absolute_error,
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda truth, guess: stats.pearsonr(truth, guess).statistic,
        "spearman": lambda truth, guess: stats.spearmanr(truth, guess).statistic,
    }
    values = targets.astype(np.float64), predictions.astype(np.float64)
    if not np.isfinite(values[1]).all():
        return dict.fromkeys(names, math.nan)
    is_constant = any((each == each[0]).all() for each in values)
    zero = {"matthews", "pearson", "spearman"} if is_constant else {}
    return {name: 0.0 if name in zero else float(functions[name](*values)) for name in names}


def answer_scores(answers: Sequence[str], right: Sequence[Sequence[str]]) -> dict[str, float]:
    """Computes F1 and exact match as the official script of SQuAD 2.0 does, 1 is perfect.

    Args:
        answers: The answer to each of N questions, empty for none.
        right: The answers that count as right, none where the context has no answer. Those without a word that counts,
            as "the", are left out.
    """
    from torchmetrics.functional.text import squad

    # numbered here, because files may use an id twice; no right answer at all counts as the empty text
    given = [{"id": str(row), "prediction_text": text} for row, text in enumerate(answers)]
    wanted = [
        {"id": str(row), "answers": {"text": [*filter(_has_words, texts)] or [""], "answer_start": [0]}}
        for row, texts in enumerate(right)
    ]
    percent = squad(given, wanted)
    return {name: float(percent[name]) / 100 for name in ANSWER_METRICS}


def _has_words(answer: str) -> bool:
    """Returns whether anything is left of an answer without punctuation and articles, which do not count."""
    words = answer.lower().translate(str.maketrans("", "", string.punctuation)).split()
    return not {"a", "an", "the"}.issuperset(words)


def _one_per_sample(num_outputs: int, hidden: Shape) -> Shape:
    return (hidden[0], num_outputs)


def _start_and_end(hidden: Shape) -> Shape:
    return (*hidden[:2], 2)


def _above_one_half(output: Tensor) -> Tensor:
    """Returns 1 for each class (B, C) whose probability, the sigmoid of its logit, is above 1/2."""
    return (output > 0).long()


def _only_output(output: Tensor) -> Tensor:
    return output.squeeze(1)

"""Tasks with a target for each token: token classification and causal language modelling.

The loss of a sample is the sum over its tokens that count, and their number is its divisor
(:attr:`~pipetransformer.data.base.Split.loss_weights`), so that a step takes the mean over the tokens of the global
batch: a mean of the samples' means would weigh a token of a short text more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.data.tasks import Shape, Task, likeliest
from pipetransformer.models.base import Head

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # target of a token that does not count; torch's and transformers' number for it
BIOES = {"L": "E", "U": "S", "M": "I", "W": "S"}  # prefixes of BILOU, BMES and BMEW by those of BIOES
LARGEST_LOSS = 700.0  # whose perplexity is a number

Tags = Sequence[Sequence[str]]
"""Tags of the words of each sample."""


def token_classification(labels: tuple[str, ...], is_chunked: bool) -> Task:
    """Returns the task of one tag per word; targets (B, T) are numbers of tags, or :data:`IGNORED`.

    It scores the tags of the words.

    Args:
        labels: Names of the tags.
        is_chunked: The tags mark chunks, such as names of persons, by their prefixes; the main metric is F1 over them.
            ``False``: each tag stands for itself, as parts of speech do, and the accuracy is the main metric.
    """
    return Task(
        "token_classification",
        Head("token", len(labels), labels),
        token_cross_entropy,
        partial(_one_per_token, len(labels)),
        chunk_scores if is_chunked else tag_scores,
    )


def causal_language_modelling(vocab_size: int) -> Task:
    """Returns the task of the next token; targets (B, T) are the tokens that follow each one, or :data:`IGNORED`.

    It scores the sums of :func:`token_sums`. The main metric is the loss, of which less is better.

    Args:
        vocab_size: Rows of the model's embedding, of which the tokenizer may use fewer.
    """
    return Task(
        "causal_language_modelling",
        Head("causal", 0),
        token_cross_entropy,
        partial(_one_per_token, vocab_size),
        next_token_scores,
    )


def token_cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of the cross-entropies of each sample's tokens that count (B,), zero where none does.

    Args:
        output: Logits (B, T, C).
        targets: Classes (B, T), :data:`IGNORED` for tokens that do not count.
    """
    return _token_losses(output, _by_token(output, targets)).sum(1)


def token_sums(output: Tensor, targets: Tensor) -> Tensor:
    """Returns sums over the tokens of each sample that count, (B, 3) of float64: losses, right predictions, tokens.

    Args:
        output: Logits (B, T, C).
        targets: As :func:`token_cross_entropy` takes them.
    """
    import torch

    wanted = _by_token(output, targets)
    parts = (_token_losses(output, wanted), likeliest(output) == wanted, wanted != IGNORED)
    return torch.stack([part.double().sum(1) for part in parts], dim=1)


def _by_token(output: Tensor, targets: Tensor) -> Tensor:
    """Returns targets (B, T) of integers; a single column arrives as (B,)."""
    return targets.reshape(output.shape[:2]).long()


def _token_losses(output: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy of each token (B, T), zero for those that do not count."""
    from torch.nn import functional

    # classes stay last: as torch's (B, C, T) the logits, the largest tensor of a language model, would be copied
    losses = functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(targets.shape)


def chunk_scores(predictions: Tags, targets: Tags) -> dict[str, float]:
    """Computes F1, precision and recall over all chunks as CoNLL's script does, and the accuracy of the tags.

    A chunk is right where its type, its first and its last word are. Prefixes are those of IOB1, IOB2 and BIOES; those
    of BILOU, BMES and BMEW are read as the same in BIOES.
    """
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    guess, truth = ([list(map(_in_bioes, tags)) for tags in each] for each in (predictions, targets))
    values = precision_recall_fscore_support(truth, guess, average="micro", zero_division=0)  # type: ignore[arg-type]
    precision, recall, f1, _ = map(float, values)  # type: ignore[arg-type]
    return {"f1": f1, "precision": precision, "recall": recall} | tag_scores(predictions, targets)


def tag_scores(predictions: Tags, targets: Tags) -> dict[str, float]:
    """Computes the fraction of all words whose tag is right."""
    is_right = [
        guess == truth
        for guesses, truths in zip(predictions, targets, strict=True)
        for guess, truth in zip(guesses, truths, strict=True)
    ]
    return {"token_accuracy": float(np.mean(is_right))}


def _in_bioes(tag: str) -> str:
    prefix, dash, kind = tag.partition("-")
    return BIOES.get(prefix, prefix) + dash + kind


def next_token_scores(sums: np.ndarray, targets: Any = None) -> dict[str, float]:
    """Computes loss, perplexity and accuracy over the tokens of all samples.

    Args:
        sums: Rows of :func:`token_sums`, (N, 3).
        targets: Not used: they are counted in the sums, so that no logits leave their device.
    """
    loss, num_right, num_tokens = sums.sum(0).tolist()
    mean = loss / num_tokens
    perplexity = math.inf if mean >= LARGEST_LOSS else math.exp(mean)  # not a number where the loss is none
    return {"loss": mean, "perplexity": perplexity, "token_accuracy": num_right / num_tokens}


def _one_per_token(num_outputs: int, hidden: Shape) -> Shape:
    return (*hidden[:2], num_outputs)

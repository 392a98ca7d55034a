"""Answers as spans of tokens: the best ones of a batch of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NULL_POSITION = 0  # the CLS token; the span [0, 0] says that the window holds no answer


def best_spans(logits: Tensor, allowed: Tensor, max_answer_length: int, k: int) -> Tensor:
    """The ``k`` best spans by the sum of their start and end logit.

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

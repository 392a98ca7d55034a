"""The objective of each task: losses by sample, and the shape of what the head returns."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pipetransformer.data.base import CLASSIFICATION, QUESTION_ANSWERING, REGRESSION
from pipetransformer.runtime.engine import Objective


def _classification(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets.long(), reduction="none")


def _regression(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output.squeeze(1), targets.to(output.dtype), reduction="none")


def _question_answering(output: Tensor, targets: Tensor) -> Tensor:
    """Padding takes no part in the softmax: the loss of a sample depends neither on its batch nor on the cache."""
    padding = torch.arange(output.shape[1], device=output.device) >= targets[:, 2:]  # (B, T)
    logits = output.masked_fill(padding[:, :, None], -math.inf)
    start, end = (F.cross_entropy(logits[:, :, i], targets[:, i].long(), reduction="none") for i in (0, 1))
    return (start + end) / 2


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    CLASSIFICATION: _classification,
    REGRESSION: _regression,
    QUESTION_ANSWERING: _question_answering,
}
"""``loss(output, targets) -> (B,)``: outputs (B, C), (B, 1) or (B, T, 2) against targets (B,), (B,) or (B, 3)."""


def objective(task: str, num_outputs: int) -> Objective:
    """What the runtime needs to know of a task."""

    def output_shape(hidden: tuple[int, ...]) -> tuple[int, ...]:
        return (*hidden[:2], num_outputs) if task == QUESTION_ANSWERING else (hidden[0], num_outputs)

    return Objective(LOSSES[task], output_shape)

"""Signals of the blocks' outputs on a fixed probe batch: the same samples of the training set at every decision.

All that is compared is how alike the samples look to a block: its Gram matrix over the samples, ``K = X X^T`` with the
output of a sample, all its tokens, in each row of ``X``. So a reference copy takes N x N numbers per block in host
memory, and no copy of the model::

    rank 0, 1, ...    for each layer: broadcast its weights, run it on the probe batch, K, free it
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipetransformer.runtime.signals.base import Collector, SignalContext

NUM_SAMPLES = 32
"""Samples of the probe batch, fewer where there are fewer."""
TOKENS_AT_ONCE = 2048
REFERENCE_DECAY = 0.5
"""Part of the reference that stays at each decision."""


def probe_grams(context: SignalContext) -> Iterator[Tensor]:
    """Yields the Gram matrix (N, N) of each block's output in evaluation mode, float64 in host memory. Collective.

    A layer at a time is on every rank. Tokens behind the end of a sample do not count. Nothing is read from the cache.
    """
    source, runtime = context.train, context.runtime
    num_samples = len(source.lengths) // source.num_draws
    ids = np.linspace(0, num_samples - 1, min(NUM_SAMPLES, num_samples)).round().astype(np.int64)
    lengths = source.lengths[ids]
    num_tokens = int(lengths.max())
    mask = torch.from_numpy(np.arange(num_tokens) < lengths[:, None])  # (N, T)
    x, details = source.inputs(ids, num_tokens), source.context(ids, num_tokens)
    size = max(1, TOKENS_AT_ONCE // num_tokens)
    for layer in range(runtime.num_layers - 1):
        with runtime.frozen_forward(layer, layer) as forward:
            parts = range(0, len(ids), size)
            x = torch.cat(
                [
                    forward(x[i : i + size], {name: each[i : i + size] for name, each in details.items()}).cpu()
                    for i in parts
                ]
            )
        if layer:
            yield gram(x, mask)


def gram(x: Tensor, mask: Tensor) -> Tensor:
    """Returns ``X X^T`` (N, N), float64, of features (N, T, D) at the tokens of a mask (N, T)."""
    total = torch.zeros(len(x), len(x), dtype=torch.float64)
    for token in range(x.shape[1]):  # float64 copies of a part at a time
        part = x[:, token].double() * mask[:, token, None]
        total += part @ part.T
    return total


def cka(one: Tensor, other: Tensor) -> float:
    """Returns the linear centred kernel alignment of two Gram matrices (Kornblith et al., ICML 2019, section 3)."""
    one, other = _centred(one), _centred(other)
    scale = one.norm() * other.norm()
    return float((one * other).sum() / scale) if scale else 1.0


def _centred(matrix: Tensor) -> Tensor:
    return matrix - matrix.mean(0) - matrix.mean(1, keepdim=True) + matrix.mean()


def similarity(matrix: Tensor) -> Tensor:
    """Returns a Gram matrix with rows of norm 1, as similarity-preserving distillation compares them."""
    norms = matrix.norm(dim=1, keepdim=True)
    return matrix / torch.where(norms > 0, norms, 1)


class _ProbeCollector(Collector):
    """Compares each block's output with a reference of Gram matrices."""

    def __init__(self, context: SignalContext) -> None:
        super().__init__(context)
        self._references: list[Tensor] = []
        self._next: list[Tensor] = []  # those from the decision on that is being taken

    def start_anew(self) -> None:
        self._references, self._next = self._next or self._references, []

    def state_dict(self) -> dict[str, Any]:
        return {"references": [each.tolist() for each in self._references]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._references = [torch.tensor(each, dtype=torch.float64) for each in state["references"]]

    def read(self) -> Sequence[float]:
        plan, num_blocks = self.context.runtime.plan, self.context.runtime.num_layers - 2
        num_frozen = 0 if plan is None else plan.num_frozen
        if num_frozen == num_blocks:  # there is nothing to compare; the references stay
            return [0.0] * num_blocks
        values = self._compare(list(probe_grams(self.context))) or [math.inf] * num_blocks
        return [0.0 if block < num_frozen else value for block, value in enumerate(values)]

    @abstractmethod
    def _compare(self, grams: list[Tensor]) -> list[float]:
        """Compares the Gram matrix of each block with its reference, and sets the next one; empty without any."""


class FeatureChange(_ProbeCollector):
    """The change of a block's output since the last decision: ``1 - CKA``; infinite at the first."""

    def _compare(self, grams: list[Tensor]) -> list[float]:
        self._next = grams
        return [max(0.0, 1 - cka(now, last)) for now, last in zip(grams, self._references, strict=False)]


class Plasticity(_ProbeCollector):
    """The distance of a block's output from an exponential moving average of it; infinite at the first decision.

    ``mean((S - S_ref)^2)`` over the N x N similarities of :func:`similarity` (Tung & Mori, ICCV 2019, eq. 3 and 4), as
    Egeria compares a block with a reference model (Wang et al., EuroSys 2023). There the reference is a copy of the
    model; on a fixed probe batch a copy of what it makes of the batch says the same.
    """

    def _compare(self, grams: list[Tensor]) -> list[float]:
        own, known = [similarity(each) for each in grams], self._references
        self._next = [last.lerp(now, 1 - REFERENCE_DECAY) for now, last in zip(own, known, strict=False)] or own
        return [float((now - last).square().mean()) for now, last in zip(own, known, strict=False)]

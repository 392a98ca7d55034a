"""A model without dropout, and with notes of the dropout that would have been."""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from pipetransformer.models import shared_dropout


class WithoutDropout:
    """A context without dropout, attention dropout and stochastic depth.

    It replaces the functions that the runtime replaces to draw by sample, and no others, so what that would not reach
    still draws.

    Attributes:
        rates: Of the dropout that would have been, in order.
        rows: The first dimension of each of its masks.
    """

    def __init__(self) -> None:
        self.clear()
        self._replaced: dict[tuple[Any, str], Callable[..., Tensor]] = {
            (F, "dropout"): self._dropout,
            (F, "scaled_dot_product_attention"): self._attention,
            (Tensor, "bernoulli_"): lambda mask, p=0.5, generator=None: self._bernoulli(mask, p, generator),
            (shared_dropout, "draw_once"): self._draw_once,
        }

    def clear(self) -> None:
        """Forgets what would have been drawn so far."""
        self.rates: list[float] = []
        self.rows: list[int | None] = []

    def __enter__(self) -> Self:
        self._original = {(owner, name): getattr(owner, name) for owner, name in self._replaced}
        for (owner, name), replacement in self._replaced.items():
            setattr(owner, name, replacement)
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name), original in self._original.items():
            setattr(owner, name, original)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        self._note(p if training else 0.0, x)
        return x.mul_(1) if inplace and training and p else x  # as a change of the input it has to show

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        *others: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        self._note(dropout_p, query)
        return self._original[F, "scaled_dot_product_attention"](query, key, value, attn_mask, 0.0, *others, **kwargs)

    def _bernoulli(self, mask: Tensor, p: float | Tensor, generator: torch.Generator | None) -> Tensor:
        if isinstance(p, Tensor) or generator is not None:
            return self._original[Tensor, "bernoulli_"](mask, p, generator=generator)
        self._note(1 - p, mask)
        return mask.fill_(1)

    def _draw_once(self, x: Tensor, p: float, training: bool) -> Tensor:
        if training and p:
            self.rates.append(float(p))
        return x

    def _note(self, rate: float, masked: Tensor) -> None:
        if rate:
            self.rates.append(float(rate))
            self.rows.append(masked.shape[0] if masked.ndim else None)

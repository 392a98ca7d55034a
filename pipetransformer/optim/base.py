"""Optimizers and the learning-rate schedule. A rate is a function of the step, so it survives every transition."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from pipetransformer.optim.traits import Traits

SCHEDULES = ("linear", "cosine", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(ABC):
    """An optimizer and its learning rates, as a user writes them.

    Attributes:
        lr: The peak learning rate.
        weight_decay: The decay of matrices; vectors (biases and normalization) have none.
        schedule: One of :data:`SCHEDULES`, after the warm-up.
        warmup: Fraction of the steps over which the rate rises to its peak, at least 0 and below 1.
        clip_norm: The largest norm of the whole gradient; ``None`` clips nothing.

    Raises:
        UserError: A value is out of its range.
    """

    lr: float
    weight_decay: float = 0.0
    schedule: str = "linear"
    warmup: float = 0.0
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UserError(f"optim.schedule={self.schedule} is unknown; choose one of {', '.join(SCHEDULES)}")
        if not 0 <= self.warmup < 1:
            raise UserError(f"optim.warmup={self.warmup} is not a fraction of the run; give 0 or more and less than 1")
        if not 0 < self.lr < math.inf:
            raise UserError(f"optim.lr={self.lr} must be a number above 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"optim.clip_norm={self.clip_norm} must be above 0, or null for no clipping")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"optim.weight_decay={self.weight_decay} must be 0 or more")

    @property
    @abstractmethod
    def state_factor(self) -> float:
        """Bytes of optimizer state per byte of parameters."""

    @property
    def is_elementwise(self) -> bool:
        """True when the update of a number depends on no other number of its parameter."""
        return True

    def check_shards(self) -> None:  # noqa: B027 - most optimizers can
        """Raises UserError where the optimizer cannot run on FSDP's shards."""

    @abstractmethod
    def _build(self, groups: list[dict[str, Any]]) -> Optimizer: ...

    def build(self, parameters: Iterable[Parameter]) -> Optimizer | None:
        """Builds the optimizer over the trainable parameters; ``None`` without any.

        Weight decay leaves out vectors (biases and normalization).
        """
        trainable = [p for p in parameters if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return self._build(groups) if groups else None

    def rate(self, step: int, num_steps: int) -> float:
        """Computes the learning rate of a step.

        Args:
            step: The step, from 0 on.
            num_steps: Steps of the run.
        """
        num_warmup = int(self.warmup * num_steps)
        if step < num_warmup:
            return self.lr * (step + 1) / num_warmup
        progress = (step - num_warmup) / max(1, num_steps - num_warmup)
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "linear":
            return self.lr * (1 - progress)
        return self.lr * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True, kw_only=True)
class _TwoMoments(OptimizerSpec):
    """An optimizer with running means of the gradient and of its square.

    Attributes:
        betas: The decay of either mean per step.
        eps: Added to the root of the second mean.
    """

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas={list(self.betas)} are not two numbers from 0 to below 1, as [0.9,0.999]")

    @property
    def state_factor(self) -> float:
        return 2.0


@dataclass(frozen=True, kw_only=True)
class AdamW(_TwoMoments):
    """Adam with decoupled weight decay (Loshchilov & Hutter, ICLR 2019)."""

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        import torch

        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps)


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec):
    """Stochastic gradient descent with momentum."""

    momentum: float = 0.9

    @property
    def state_factor(self) -> float:
        return 1.0 if self.momentum else 0.0

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        import torch

        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class Lamb(_TwoMoments):
    """Layer-wise adaptive rates for large batches (You et al., ICLR 2020)."""

    eps: float = 1e-6

    @property
    def is_elementwise(self) -> bool:
        return False

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        from pipetransformer.optim.portable import PortableOptimizer

        return PortableOptimizer.wrap(self._plain, groups, self._traits)

    @cached_property
    def _traits(self) -> Traits:
        from pipetransformer.optim.traits import measure

        return measure(self._plain, "optim=lamb")

    def _plain(self, groups: list[dict[str, Any]]) -> Optimizer:
        from timm.optim import Lamb

        # the runtime clips, because only it knows the norm over all ranks
        return Lamb(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, max_grad_norm=None)

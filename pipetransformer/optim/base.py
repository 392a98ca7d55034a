"""Optimizers and the learning-rate schedule. Rates are a function of the step, so they survive every transition."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

SCHEDULES = ("linear", "cosine", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(ABC):
    """Attributes: lr: peak rate; warmup: share of the run with a rising rate; clip_norm: of the whole gradient."""

    lr: float
    weight_decay: float = 0.0
    schedule: str = "linear"
    warmup: float = 0.0
    clip_norm: float | None = 1.0

    is_elementwise: ClassVar[bool] = True
    """A part of a parameter is updated without looking at the rest of it."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UserError(f"optim.schedule={self.schedule} is unknown; choose one of {', '.join(SCHEDULES)}")
        if not 0 <= self.warmup < 1:
            raise UserError(f"optim.warmup={self.warmup} is not a share of the run; give 0 or more and less than 1")
        if self.lr <= 0 or (self.clip_norm is not None and self.clip_norm <= 0):
            raise UserError(f"optim.lr={self.lr} and optim.clip_norm={self.clip_norm} must be above 0")

    @property
    @abstractmethod
    def state_factor(self) -> float:
        """Bytes of optimizer state per byte of parameters."""

    @abstractmethod
    def _build(self, groups: list[dict[str, Any]]) -> Optimizer: ...

    def build(self, parameters: Iterable[Parameter]) -> Optimizer | None:
        """The optimizer over the trainable parameters; ``None`` where there are none.

        Weight decay leaves out vectors (biases and normalisation).
        """
        from pipetransformer.optim.sharded import Shardwise
        from pipetransformer.runtime.parts import is_sharded

        trainable = [p for p in parameters if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if groups and self.is_elementwise and is_sharded(trainable[0]):
            return Shardwise(groups, self._build)
        return self._build(groups) if groups else None

    def rate(self, step: int, num_steps: int) -> float:
        """Learning rate of the step, 0-based, out of ``num_steps``."""
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
    """Attributes: betas, eps: of the running means of the gradient and of its square."""

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
    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        import torch

        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps)


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec):
    momentum: float = 0.9

    @property
    def state_factor(self) -> float:
        return 1.0 if self.momentum else 0.0

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        import torch

        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class Lamb(_TwoMoments):
    """Layer-wise adaptive rates for large batches."""

    eps: float = 1e-6

    is_elementwise: ClassVar[bool] = False

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        from pipetransformer.optim.lamb import PortableLamb

        single = [group | {"params": [parameter]} for group in groups for parameter in group["params"]]
        return PortableLamb(single, self.lr, (self.betas[0], self.betas[1]), self.eps)

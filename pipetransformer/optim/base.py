"""Optimizers and the learning-rate schedule. A rate is a function of the step, so it survives every transition."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from pipetransformer.errors import UserError
from pipetransformer.kinds import check_kinds, kinds_of
from pipetransformer.optim.schedules import SCHEDULES, by_width, falling, inverse_sqrt, steps_down

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from pipetransformer.optim.lamb import SumOverParts
    from pipetransformer.optim.traits import Traits


FROM_SCRATCH = 10.0  # times the learning rate of a recipe, where weights are drawn; so much lies between the field's


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(ABC):
    """An optimizer and its learning rates, as a user writes them.

    A class of one's own defines ``_build(groups)``, which returns a ``torch.optim.Optimizer`` over parameter groups
    with ``params`` and ``weight_decay``; a step's rate is put into their ``lr``. Its update of a parameter has to
    depend on that parameter alone. This is measured on small parameters, as are the size of its state and whether it
    can run on parts of a parameter.

    Attributes:
        lr: The peak learning rate; ``None``: the recipe's, by the model's width, see :meth:`for_model`.
        recipe_lr: The peak learning rate of the recipe, for AdamW and a pretrained model of width 768.
        scratch_lr: The peak learning rate of the recipe for a model whose weights are drawn, whatever its width;
            ``None``: ten times that of a pretrained one.
        weight_decay: The decay of matrices; vectors (biases and normalization) have none.
        schedule: One of :data:`~pipetransformer.optim.schedules.SCHEDULES`, after the warm-up.
        warmup: Fraction of the steps over which the rate rises to its peak, at least 0 and below 1.
        warmup_steps: Their number, in place of ``warmup``.
        final_fraction: Rate at the end of ``linear``, ``cosine`` and ``polynomial``, as a fraction of the peak.
        power: Exponent of ``polynomial``.
        milestones: Fractions of the run after which ``step`` lowers the rate, ascending.
        gamma: Factor of ``step`` at each milestone.
        layer_decay: Factor of the rate from each layer to the one below: the head has the rate itself, the embedding
            of L blocks ``layer_decay ** (L + 1)`` times it (Clark et al., ICLR 2020; Bao et al., ICLR 2022).
        ema_decay: Decay of an exponential moving average of the weights, which evaluations and the saved model take;
            ``None`` averages nothing. A frozen layer's average is the weights that it froze with.
        clip_norm: The largest norm of the whole gradient; ``None`` clips nothing.

    Raises:
        UserError: A value is out of its range.
    """

    lr: float | None = None
    recipe_lr: float = 2e-5
    scratch_lr: float | None = None
    weight_decay: float = 0.0
    schedule: str = "linear"
    warmup: float = 0.0
    warmup_steps: int | None = None
    final_fraction: float = 0.0
    power: float = 1.0
    milestones: list[float] = field(default_factory=list)
    gamma: float = 0.1
    layer_decay: float = 1.0
    ema_decay: float | None = None
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        check_kinds(vars(self), kinds_of(type(self)), "optim.")
        if self.schedule not in SCHEDULES:
            raise UserError(f"optim.schedule={self.schedule} is unknown; choose one of {', '.join(SCHEDULES)}")
        if not 0 <= self.warmup < 1:
            raise UserError(f"optim.warmup={self.warmup} is not a fraction of the run; give 0 or more and less than 1")
        self._check_schedule()
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"optim.layer_decay={self.layer_decay} must be above 0 and at most 1, as 0.75; 1 for none")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise UserError(f"optim.ema_decay={self.ema_decay} must be above 0 and below 1, as 0.999; null for none")
        for option in ("lr", "recipe_lr", "scratch_lr"):
            rate = getattr(self, option)
            if rate is not None and not 0 < rate < math.inf:
                raise UserError(f"optim.{option}={rate} must be a number above 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"optim.clip_norm={self.clip_norm} must be above 0, or null for no clipping")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"optim.weight_decay={self.weight_decay} must be 0 or more")

    def _check_schedule(self) -> None:
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise UserError(f"optim.warmup_steps={self.warmup_steps} must be 0 or more, or null for optim.warmup")
        if not 0 <= self.final_fraction <= 1:
            raise UserError(f"optim.final_fraction={self.final_fraction} is not from 0 to 1: it is a part of optim.lr")
        if not self.power > 0:
            raise UserError(f"optim.power={self.power} must be above 0")
        if not 0 < self.gamma <= 1:
            raise UserError(f"optim.gamma={self.gamma} must be above 0 and at most 1")
        milestones = list(self.milestones)
        if milestones != sorted(milestones) or not all(0 < each < 1 for each in milestones):
            raise UserError(
                f"optim.milestones={milestones} are not ascending fractions of the run; give them as [0.5,0.75]"
            )
        if (self.schedule == "step") != bool(milestones):
            raise UserError(
                f"optim.milestones={milestones} and optim.schedule={self.schedule} do not go together: the schedule "
                "step needs milestones, as [0.5,0.75], and no other has them"
            )

    def for_model(self, width: int, factor: float = 1.0, pretrained: bool = True) -> Self:
        """Returns the specification with a peak learning rate.

        Args:
            width: Numbers per token between the layers of the model.
            factor: Of the recipe's rate, where other weights train than in the recipe.
            pretrained: The model begins with published weights.
        """
        if self.lr is not None:
            return self
        if self.scratch_lr is not None and not pretrained:
            return replace(self, lr=self.scratch_lr)
        return replace(self, lr=factor * (1 if pretrained else FROM_SCRATCH) * by_width(self.recipe_lr, width))

    @property
    def peak(self) -> float:
        """The peak learning rate of a specification that is :meth:`for_model`."""
        assert self.lr is not None, "the rate follows from the model"
        return self.lr

    @property
    def state_factor(self) -> float:
        """Bytes of optimizer state per byte of parameters, the average of the weights included."""
        return self._own_state_factor + (self.ema_decay is not None)

    @cached_property
    def traits(self) -> Traits:
        """Measured on small parameters."""
        from pipetransformer.optim.traits import measure

        return measure(self._build, self._label)

    @property
    def _label(self) -> str:
        """The optimizer in messages."""
        return type(self).__name__

    @property
    def _is_known(self) -> bool:
        """True where nothing has to be measured: the update is elementwise, and all state is tensors by parameter."""
        return type(self) in (AdamW, SGD)

    @property
    def _own_state_factor(self) -> float:
        return self.traits.state_factor

    @property
    def is_elementwise(self) -> bool:
        """True when the update of a number depends on no other number of its parameter."""
        return self._is_known or self.traits.is_elementwise

    @property
    def takes_parts(self) -> bool:
        """True when it runs on parameters of which the ranks of a mesh have parts."""
        return self.is_elementwise

    def check_parts(self) -> None:
        """Raises UserError where the optimizer cannot run on the parts of a mesh."""
        if not self.takes_parts:
            raise UserError(
                f"{self._label} needs each weight in one piece, and a mesh has them in parts; take optim=adamw, lamb "
                "or sgd"
            )

    def check_shards(self) -> None:
        """Raises UserError where the optimizer cannot run on FSDP's shards."""
        if not self.is_elementwise:
            raise UserError(
                f"{self._label} updates a number by other numbers of its parameter, of which parallel=sharded gives it "
                "a part; choose another optimizer or arrangement"
            )

    @abstractmethod
    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Builds the optimizer as it is."""

    def _build_portable(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Builds the optimizer with all that it remembers beside each parameter."""
        if self._is_known:
            return self._build(groups)
        from pipetransformer.optim.portable import PortableOptimizer

        return PortableOptimizer.wrap(self._build, groups, self.traits)

    def _build_of_parts(self, groups: list[dict[str, Any]], sum_over_parts: SumOverParts) -> Optimizer:
        return self._build_portable(groups)

    def build(self, parameters: Iterable[Parameter]) -> Optimizer | None:
        """Builds the optimizer over the trainable parameters of one layer; ``None`` without any."""
        return self.build_layers({0: parameters})

    def build_layers(
        self, parameters: Mapping[int, Iterable[Parameter]], own_rates: bool = False,
        sum_over_parts: SumOverParts | None = None,
    ) -> Optimizer | None:  # fmt: skip
        """Builds the optimizer over the trainable parameters of several layers; ``None`` without any.

        Weight decay leaves out vectors (biases and normalization). Each group has a key ``layer``: its rate is that
        of this layer. Layers have groups of their own only where their rates differ, because groups take their time.

        Args:
            parameters: By layer.
            own_rates: Layers have rates of their own, whatever ``layer_decay`` is.
            sum_over_parts: Sums numbers of parameters over the ranks that have parts of them; ``None``: they are whole.
        """
        trainable = {layer: [p for p in own if p.requires_grad] for layer, own in parameters.items()}
        if self.layer_decay == 1 and not own_rates:
            trainable = {0: list(chain.from_iterable(trainable.values()))}
        groups = [
            {
                "params": [p for p in own if (p.ndim > 1) == decays],
                "weight_decay": decays * self.weight_decay,
                "layer": n,
            }
            for n, own in trainable.items()
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        if not groups:
            return None
        whole = sum_over_parts is None
        optimizer = self._build_portable(groups) if whole else self._build_of_parts(groups, sum_over_parts)
        self._check_groups(optimizer, groups)
        return optimizer if self.ema_decay is None else _averaging(optimizer, self.ema_decay)

    def _check_groups(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuses an optimizer of the user's that has other parameters than it was to train."""
        wanted, taken = (
            {id(each) for group in some for each in group["params"]} for some in (groups, optimizer.param_groups)
        )
        if taken != wanted or not all("layer" in group for group in optimizer.param_groups):
            raise UserError(
                f"{self._label}._build returned an optimizer over {len(taken & wanted)} of the {len(wanted)} "
                f"parameters that it was to train and {len(taken - wanted)} others; give it all groups as they are"
            )

    def rate(self, step: int, num_steps: int) -> float:
        """Computes the learning rate of a step, that of the head.

        Args:
            step: The step, from 0 on.
            num_steps: Steps of the run.
        """
        num_warmup = self._num_warmup(num_steps)
        if step < num_warmup:
            return self.peak * (step + 1) / num_warmup
        if self.schedule == "constant":
            return self.peak
        if self.schedule == "inverse_sqrt":
            return self.peak * inverse_sqrt(step, num_warmup)
        if self.schedule == "step":
            return self.peak * steps_down(step / num_steps, self.milestones, self.gamma)
        progress = (step - num_warmup) / max(1, num_steps - num_warmup)
        return self.peak * falling(self.schedule, progress, self.final_fraction, self.power)

    def highest_rate(self, num_steps: int) -> float:
        """Computes the highest rate of a run: the peak, unless the warm-up takes longer than the run."""
        return self.peak if self._num_warmup(num_steps) <= num_steps else self.rate(num_steps - 1, num_steps)

    def _num_warmup(self, num_steps: int) -> int:
        """Computes the steps of the warm-up; a fraction is rounded up, as by transformers."""
        exact = self.warmup * num_steps if self.warmup_steps is None else self.warmup_steps
        return math.ceil(exact - 1e-9)  # but for the noise that would make 8 steps of 0.07 * 100

    def rates(self, rate: float, num_layers: int) -> list[float]:
        """Computes the learning rate of each layer from that of the head."""
        return [rate * self.layer_decay ** (num_layers - 1 - layer) for layer in range(num_layers)]


def _averaging(optimizer: Optimizer, decay: float) -> Optimizer:
    from pipetransformer.optim.averaging import AveragingOptimizer

    return AveragingOptimizer(optimizer, decay)


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
        if not 0 <= self.eps < math.inf:
            raise UserError(f"optim.eps={self.eps} must be 0 or more, as 1e-8")

    @property
    def _own_state_factor(self) -> float:
        return 2.0 if type(self)._build in (AdamW._build, Lamb._build) else super()._own_state_factor


@dataclass(frozen=True, kw_only=True)
class AdamW(_TwoMoments):
    """Adam with decoupled weight decay (Loshchilov & Hutter, ICLR 2019)."""

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        import torch

        from pipetransformer.optim.fused import may_fuse

        betas, fused = (self.betas[0], self.betas[1]), may_fuse(groups) or None
        return torch.optim.AdamW(groups, lr=self.peak, betas=betas, eps=self.eps, fused=fused)


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec):
    """Stochastic gradient descent with momentum."""

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise UserError(f"optim.momentum={self.momentum} must be 0 or more and below 1, as 0.9")

    @property
    def _own_state_factor(self) -> float:
        if type(self)._build is not SGD._build:
            return super()._own_state_factor
        return 1.0 if self.momentum else 0.0

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        import torch

        from pipetransformer.optim.fused import begin_buffers_at_zero, may_fuse

        fused = may_fuse(groups) or None
        optimizer = torch.optim.SGD(groups, lr=self.peak, momentum=self.momentum, fused=fused)
        if fused:
            begin_buffers_at_zero(optimizer)
        return optimizer


@dataclass(frozen=True, kw_only=True)
class Lamb(_TwoMoments):
    """Layer-wise adaptive rates for large batches (You et al., ICLR 2020)."""

    eps: float = 1e-6

    @property
    def _is_lamb(self) -> bool:
        """False of a subclass that builds another optimizer."""
        return type(self)._build is Lamb._build

    @property
    def is_elementwise(self) -> bool:
        return not self._is_lamb and super().is_elementwise

    @property
    def takes_parts(self) -> bool:
        return self._is_lamb or super().takes_parts

    def _build_of_parts(self, groups: list[dict[str, Any]], sum_over_parts: SumOverParts) -> Optimizer:
        if not self._is_lamb:
            return super()._build_of_parts(groups, sum_over_parts)
        from pipetransformer.optim.lamb import LambOfParts

        return LambOfParts(groups, self.peak, (self.betas[0], self.betas[1]), self.eps, sum_over_parts)

    def check_shards(self) -> None:
        """Takes any: its norms are those of whole parameters, of DTensors too."""
        if not self._is_lamb:
            super().check_shards()

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        from timm.optim import Lamb

        # the runtime clips, because only it knows the norm over all ranks
        return Lamb(groups, lr=self.peak, betas=(self.betas[0], self.betas[1]), eps=self.eps, max_grad_norm=None)

"""Optimizers of torch and timm by their names. Names and options are read from the libraries' source, without torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from pipetransformer.errors import UserError
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.optim.signatures import timm_optimizers, torch_optimizers

if TYPE_CHECKING:
    from torch.optim import Optimizer

_NOT_AN_OPTION = {"lr": "use optim.lr", "weight_decay": "use optim.weight_decay", "params": "they are the model's"}


@dataclass(frozen=True, kw_only=True)
class NamedOptimizer(OptimizerSpec):
    """An optimizer of a library.

    Its update of a parameter has to depend on that parameter alone; this is measured, as are the size of its state and
    whether it can run on FSDP's shards.

    Attributes:
        name: Its name in the library.
        options: Arguments of its class.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    library: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self._known()
        if self.name not in known:
            near = get_close_matches(self.name, known, n=3, cutoff=0.5)
            near = near or [name for name in known if name.lower() == self.name.lower()]
            told = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(known))}"
            raise UserError(f"optim.name={self.name} is no optimizer of {self.library}; {told}")
        for option, remedy in _NOT_AN_OPTION.items():
            if option in self.options:
                raise UserError(f"optim.options.{option} is not an option: {remedy}")
        arguments = known[self.name] - _NOT_AN_OPTION.keys()
        if unknown := sorted(self.options.keys() - arguments):
            near = get_close_matches(unknown[0], arguments, n=1)
            told = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(arguments))}"
            raise UserError(f"optim.options.{unknown[0]} is no argument of {self.library}'s {self.name}; {told}")
        if self.weight_decay and known[self.name] and "weight_decay" not in known[self.name]:
            raise UserError(f"optim.name={self.name} has no weight decay; give optim.weight_decay=0")

    @abstractmethod
    def _known(self) -> dict[str, frozenset[str]]:
        """Returns the library's optimizers, each with the arguments of its class."""

    @property
    def _label(self) -> str:
        return f"optim.name={self.name}"

    def _arguments(self) -> dict[str, Any]:
        return {name: tuple(each) if isinstance(each, list) else each for name, each in self.options.items()}


@dataclass(frozen=True, kw_only=True)
class TorchOptimizer(NamedOptimizer):
    """An optimizer of ``torch.optim``: Adagrad, Adamax, NAdam, RMSprop, ..."""

    library: ClassVar[str] = "torch.optim"

    def _known(self) -> dict[str, frozenset[str]]:
        return torch_optimizers()

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        import torch

        return getattr(torch.optim, self.name)(groups, lr=self.peak, **self._arguments())


@dataclass(frozen=True, kw_only=True)
class TimmOptimizer(NamedOptimizer):
    """An optimizer of ``timm.optim``: lion, adan, adopt, laprop, muon, ..."""

    library: ClassVar[str] = "timm"

    def _known(self) -> dict[str, frozenset[str]]:
        return timm_optimizers()

    def _build(self, groups: list[dict[str, Any]]) -> Optimizer:
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(groups, opt=self.name, lr=self.peak, weight_decay=0.0, **self._arguments())

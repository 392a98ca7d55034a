"""Adapters: small weights that train beside frozen ones. Torch and peft are imported only inside the methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pipetransformer.errors import UserError
from pipetransformer.models.base import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from pipetransformer.models.stack import LayerStack

    State = dict[str, Tensor]
BIASES = ("none", "lora_only", "all")


@dataclass(frozen=True, kw_only=True)
class AdapterSpec(ABC):
    """Adapters of a model.

    Attributes:
        libraries: Modules that :meth:`apply` imports; a fork server preloads them.
        rate_factor: Of a recipe's learning rate: adapters begin at zero and take a larger one (Hu et al., ICLR 2022).
    """

    libraries: ClassVar[tuple[str, ...]] = ()
    rate_factor: ClassVar[float] = 1.0

    @abstractmethod
    def apply(self, stack: LayerStack, seed: int) -> None:
        """Puts the adapters into the layers of a stack, and fixes all weights beside them.

        Their initial weights depend on the seed and their names alone.

        Raises:
            UserError: The model has no place for them.
        """

    @abstractmethod
    def save(self, model: ModelSpec, stack: LayerStack, state: State, folder: Path) -> None:
        """Writes what has been trained.

        Args:
            model: Writes a model without adapters.
            stack: With the adapters in its layers.
            state: All tensors by the names of the stack.
            folder: Where to.
        """

    @abstractmethod
    def open_saved(self, model: ModelSpec, folder: Path) -> ModelSpec:
        """Returns the model that :meth:`load_saved` takes for a folder that :meth:`save` wrote."""

    @abstractmethod
    def load_saved(self, stack: LayerStack, folder: Path) -> None:
        """Makes a folder that :meth:`save` wrote the source of a stack's weights."""

    @abstractmethod
    def merge(self, stack: LayerStack, state: State) -> State:
        """Returns the weights of the model without adapters that computes the same, by original names."""


@dataclass(frozen=True, kw_only=True)
class NoAdapters(AdapterSpec):
    """All weights train."""

    def apply(self, stack: LayerStack, seed: int) -> None:
        """Changes nothing."""

    def save(self, model: ModelSpec, stack: LayerStack, state: State, folder: Path) -> None:
        model.save(stack, state, folder)

    def open_saved(self, model: ModelSpec, folder: Path) -> ModelSpec:
        return replace(model, name=str(folder), pretrained=True)

    def load_saved(self, stack: LayerStack, folder: Path) -> None:
        """Changes nothing: the model is the folder's."""

    def merge(self, stack: LayerStack, state: State) -> State:
        return state


@dataclass(frozen=True, kw_only=True)
class Lora(AdapterSpec):
    """Products of two matrices of low rank beside linear layers of the blocks (Hu et al., ICLR 2022), by peft.

    The head trains in full, as peft's ``modules_to_save`` do; embedding and blocks keep their weights.

    Attributes:
        r: The rank.
        alpha: The product counts ``alpha / r`` times.
        dropout: Rate of the adapters' inputs.
        target_modules: Names of linear layers in a block, or the last parts of them; ``[all-linear]`` for all. Empty
            takes those that peft has for the family, or all.
        bias: One of :data:`BIASES`: the biases that train in addition.
    """

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: list[str] = field(default_factory=list)
    bias: str = "none"

    libraries: ClassVar[tuple[str, ...]] = ("peft",)
    rate_factor: ClassVar[float] = 10.0

    def __post_init__(self) -> None:
        if self.r < 1:
            raise UserError(f"peft.r={self.r} must be at least 1: it is the rank of the adapters")
        if not self.alpha > 0:
            raise UserError(f"peft.alpha={self.alpha} must be above 0: the adapters count alpha / r times")
        if not 0 <= self.dropout < 1:
            raise UserError(f"peft.dropout={self.dropout} is no rate; give 0 or more and less than 1")
        if self.bias not in BIASES:
            raise UserError(f"peft.bias={self.bias} is unknown; choose one of {', '.join(BIASES)}")

    def apply(self, stack: LayerStack, seed: int) -> None:
        from pipetransformer.models.lora import inject

        inject(self, stack, seed)

    def save(self, model: ModelSpec, stack: LayerStack, state: State, folder: Path) -> None:
        """Writes adapters and head in peft's format, for ``PeftModel.from_pretrained(base, folder)``.

        The base is that of the model's library with the settings that lie in the folder, too: classes, padding token.
        """
        from pipetransformer.models.lora import save

        save(self, stack, state, model.base_name, folder)
        model.save_settings(stack, folder)

    def open_saved(self, model: ModelSpec, folder: Path) -> ModelSpec:
        return model

    def load_saved(self, stack: LayerStack, folder: Path) -> None:
        from pipetransformer.models.lora import load_saved

        load_saved(stack, folder)

    def merge(self, stack: LayerStack, state: State) -> State:
        from pipetransformer.models.lora import merge

        return merge(stack, state)

"""Model specifications. Torch is imported only inside the methods, so that configuration stays fast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipetransformer.errors import UserError
from pipetransformer.hub import TIMEOUT_S

if TYPE_CHECKING:
    from torch import Tensor

    from pipetransformer.models.stack import LayerStack


@dataclass(frozen=True)
class Head:
    """The last layer that a task asks for.

    Attributes:
        kind: ``sequence`` returns (B, num_outputs) from a text, ``token`` and ``span`` (B, T, num_outputs), ``image``
            (B, num_outputs) from an image. ``causal`` returns (B, T, V) over the model's vocabulary, each token's row
            from those up to it.
        num_outputs: Classes; 1 for a value, 2 for the start and end of a span, not used by a causal head.
        labels: Name of each class where they are known.
        problem_type: The word of transformers' configurations for the loss; ``None`` where there is none.
    """

    kind: str
    num_outputs: int
    labels: tuple[str, ...] = ()
    problem_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ABC):
    """A model family's adapter: one file, one YAML, one row in the contract test.

    Attributes:
        name: Hub name, or a local folder that holds the model.
        pretrained: Start from the published weights; ``False`` initializes them from the seed.
        allow_pickle: Read weights that there are only as a pickle, with ``weights_only=True``; ``False`` refuses them.
        modality: ``image`` or ``text``, the data that the family reads.
        libraries: Modules that building a model imports; a fork server preloads them.
    """

    name: str
    pretrained: bool = True
    allow_pickle: bool = False

    modality: ClassVar[str] = "image"
    libraries: ClassVar[tuple[str, ...]] = ()

    def _check_picture(self, **sizes: int | None) -> None:
        """Raises UserError for a size of pictures below one."""
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise UserError(f"model.{name}={size} must be at least 1, or null for that of the model or the data")

    @property
    def base_name(self) -> str:
        """The name by which peft finds the model that saved adapters belong to."""
        return self.name

    def check(self) -> None:  # noqa: B027 - most families have nothing to add
        """Raises UserError for options that can be refused without loading torch."""

    @abstractmethod
    def check_exists(self, timeout_s: float = TIMEOUT_S) -> None:
        """Looks once, without torch, whether disk or hub have the model; a launcher calls it before processes start.

        Args:
            timeout_s: Seconds to wait for the hub, where it is asked at all.

        Raises:
            UserError: Neither has it, or the hub does not answer.
        """

    @abstractmethod
    def input_format(self) -> dict[str, Any]:
        """Returns keyword arguments of the data format that the model reads (``ImageFormat`` or ``TextFormat``)."""

    @abstractmethod
    def build_meta(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        """Returns the model as a flat stack on the meta device, embedding first and head last.

        Its ``source`` yields a layer's tensors by the names in ``stack.names()``. They depend on the seed alone, not on
        which layers a process loads or in which order.

        Args:
            head: The last layer that the task asks for.
            input_shape: (C, H, W) of an image, () for text.
            seed: Of the weights that are not pretrained.

        Raises:
            UserError: The model does not exist, cannot be trained layer by layer, or does not fit the data.
        """

    def build(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        """Returns the stack with all weights, in host memory."""
        stack = self.build_meta(head, input_shape, seed)
        for index in range(len(stack)):
            stack.load(index)
        return stack

    @abstractmethod
    def save(self, stack: LayerStack, state: dict[str, Tensor], folder: Path) -> None:
        """Writes all weights (original names) so that the original library loads them with equal outputs.

        Args:
            stack: As :meth:`build_meta` gave it.
            state: All tensors by their original names.
            folder: Where to.
        """

    def save_settings(self, stack: LayerStack, folder: Path) -> None:  # noqa: B027 - timm has none
        """Writes what the original library reads beside the weights of a model, for those that adapters belong to.

        Args:
            stack: As :meth:`build_meta` gave it.
            folder: Where to.
        """

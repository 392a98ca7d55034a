"""What a user writes about a model. Torch is imported only inside the methods, so that configuration stays fast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from pipetransformer.models.stack import LayerStack


@dataclass(frozen=True)
class Head:
    """The last layer that a task asks for.

    Attributes:
        kind: ``sequence`` returns (B, num_outputs) from a text, ``token`` and ``span`` (B, T, num_outputs), ``image``
            (B, num_outputs) from an image.
        num_outputs: Classes; 1 for a value, 2 for the start and end of a span.
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
        pretrained: Start from the published weights; ``False`` draws them from the seed.
    """

    name: str
    pretrained: bool = True

    modality: ClassVar[str] = "image"  # or "text"
    libraries: ClassVar[tuple[str, ...]] = ()  # that building it imports; where ranks are forked, before that and once

    def check(self) -> None:  # noqa: B027 - most families have nothing to add
        """Raises ValueError for what can be seen to be wrong without loading torch."""

    @abstractmethod
    def input_format(self) -> dict[str, Any]:
        """Keyword arguments of the data format that the model wants (``ImageFormat`` or ``TextFormat``)."""

    @abstractmethod
    def outline(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        """The model as a flat stack, embedding first and head last, whose layers get their weights when asked for.

        A layer's initial weights depend on the seed alone, not on which layers a process loads or in which order.

        Raises:
            ValueError: The model is not there, or the data does not fit it.
        """

    def build(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        """The outline with all weights, in host memory."""
        stack = self.outline(head, input_shape, seed)
        for index in range(len(stack)):
            stack.load(index)
        return stack

    @abstractmethod
    def save(self, stack: LayerStack, state: dict[str, Tensor], folder: Path) -> None:
        """Writes all weights (original names) so that the original library loads them with equal outputs."""

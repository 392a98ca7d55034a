"""Collectors: each measures one signal that a freeze policy asks for, the same at any topology.

::

    step       squared norms of the gradient, all-reduced for clipping ──► add_norms     nothing more is measured
    update     weights before and after some of the optimizer's steps  ──► sums, one all-reduce ──► add_sums
    decision   ──► read, then rank 0's numbers are broadcast           ──► start_anew

Every rank makes the same calls. A collector whose numbers come from steps counts on the ranks that take part in a plan,
which rank 0 always does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pipetransformer.autocache.source import SampleSource
from pipetransformer.errors import UserError
from pipetransformer.runtime.elastic import ElasticRuntime


@dataclass(frozen=True)
class SignalContext:
    """Everything that a collector may measure.

    Attributes:
        runtime: Holds the layers and their optimizer.
        train: The training samples as the cache sees them.
        step_shares: Returns the seconds of a step with 0 to L blocks frozen over those with none, shape (L + 1,).
    """

    runtime: ElasticRuntime
    train: SampleSource
    step_shares: Callable[[], Sequence[float]]

    @property
    def num_blocks(self) -> int:
        return self.runtime.num_layers - 2


class Collector(ABC):
    """Measures a signal between two decisions.

    Args:
        context: What there is to measure.
    """

    def __init__(self, context: SignalContext) -> None:
        self.context = context

    def add_norms(self, norms: Sequence[float]) -> None:  # noqa: B027 - most collectors take none
        """Takes the gradient norms of a step before clipping, one per block (L,)."""

    @abstractmethod
    def read(self) -> Sequence[float]:
        """Returns the signal, one number per block (L,) and 0 for frozen ones. Collective; rank 0's numbers count.

        It changes nothing: a run that is stopped before its decision measures again. ``step_share`` alone has other
        numbers.
        """

    def start_anew(self) -> None:  # noqa: B027 - some have nothing to forget
        """Forgets what belongs to the time before a decision."""

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can hold without loss."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values of :meth:`state_dict`."""
        assert not state, state


class MeanCollector(Collector):
    """The mean of numbers that come step by step."""

    def __init__(self, context: SignalContext) -> None:
        super().__init__(context)
        self._sums = [0.0] * context.num_blocks
        self._count = 0

    def add(self, values: Sequence[float]) -> None:
        """Counts the numbers of a step, one per block (L,)."""
        self._sums = [total + value for total, value in zip(self._sums, values, strict=True)]
        self._count += 1

    def read(self) -> Sequence[float]:
        return [total / max(1, self._count) for total in self._sums]

    def start_anew(self) -> None:
        self._sums, self._count = [0.0] * len(self._sums), 0

    def state_dict(self) -> dict[str, Any]:
        return {"sums": list(self._sums), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sums, self._count = [float(each) for each in state["sums"]], int(state["count"])
        if len(sums) != len(self._sums):
            raise UserError(f"it was measured of {len(sums)} blocks, and this model has {len(self._sums)}")
        self._sums = sums


class UpdateCollector(MeanCollector):
    """The mean of numbers that come from updates of the weights.

    Attributes:
        num_sums: Numbers of :meth:`sums`.
        needs_gradient: They are made of the gradient, which is copied then.
    """

    num_sums: ClassVar[int] = 1
    needs_gradient: ClassVar[bool] = False

    @abstractmethod
    def sums(self, before: Tensor, update: Tensor, gradient: Tensor) -> Sequence[Tensor]:
        """Returns scalars that add up over the parts of a block, however ranks divide them.

        Args:
            before: A part of a block's weights before the update.
            update: Weights after it minus those before.
            gradient: Of the mean loss over the global batch, before clipping; empty where no collector needs it.
        """

    @abstractmethod
    def add_sums(self, sums: Sequence[Sequence[float]]) -> None:
        """Takes the sums over whole blocks (num_sums, L)."""

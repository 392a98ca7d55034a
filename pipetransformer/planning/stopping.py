"""The main metric of a run, whether an evaluation brought a new best, and when the run has waited long enough. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipetransformer.config.sections import Evaluation
from pipetransformer.errors import UserError
from pipetransformer.freeze.common import NOISE
from pipetransformer.metric import sign_of


def wanted_metric(wanted: str | None, splits: Sequence[str]) -> tuple[str, str | None]:
    """Returns the split of ``evaluate.metric`` and the name of the metric; ``None``: the first of that split.

    Args:
        wanted: ``name``, ``split/name`` or ``None``.
        splits: Names of the evaluation splits, the main one first.

    Raises:
        UserError: There is no such split.
    """
    split, _, name = (wanted or "").rpartition("/")
    if split and split not in splits:
        raise UserError(f"evaluate.metric={wanted}: there is no split {split}; choose of {', '.join(splits)}")
    return split or splits[0], name or None


def check_metric(wanted: str | None, split: str, names: Sequence[str]) -> None:
    """Refuses an ``evaluate.metric`` that the split does not have.

    Args:
        names: Metrics of the split.

    Raises:
        UserError: With those that it has.
    """
    name = (wanted or "").rpartition("/")[2]
    if name and name not in names:
        raise UserError(f"evaluate.metric={wanted}: {split} is not scored by {name}; choose of {', '.join(names)}")


@dataclass
class Patience:
    """How long a run has waited for a new best, a part of :class:`~pipetransformer.planning.state.TrainState`.

    Attributes:
        value: The last value that counted as a new best; ``None`` before the first evaluation.
        num_waited: Evaluations since.
        reason: Why the run ends before its last step; empty while it goes on.
    """

    value: float | None = None
    num_waited: int = 0
    reason: str = ""

    def count(self, options: Evaluation, name: str, value: float) -> None:
        """Counts an evaluation.

        Args:
            name: Of the main metric.
            value: Its value now.
        """
        best = math.nan if self.value is None else self.value
        is_first = self.value is None or (math.isnan(best) and not math.isnan(value))  # any number is better than NaN
        gained = math.inf if is_first else sign_of(name) * (value - best)
        if gained > options.min_delta + NOISE * bool(options.min_delta):
            self.value, self.num_waited = value, 0
            return
        self.num_waited += 1
        if options.patience is not None and self.num_waited >= options.patience:
            by = f" by more than {options.min_delta:g}" if options.min_delta else ""
            times = "1 evaluation" if options.patience == 1 else f"{options.patience} evaluations"
            better = "higher" if sign_of(name) > 0 else "lower"
            self.reason = f"no {better} {name} than {self.value:.4g}{by} for {times}"

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can hold without loss."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Patience:
        """Returns the state of :meth:`state_dict`."""
        return cls(**state)

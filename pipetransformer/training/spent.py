"""Seconds and counts of a run besides the steps of its history, on rank 0, over all the processes that it has had."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pipetransformer.planning.state import Stateful
from pipetransformer.report.reporter import Reporter


class Spent:
    """Counts that a run which goes on has from its checkpoint, so that the summary is of the whole run.

    As with the history, what a process spent after its last checkpoint is lost.

    Args:
        report: Counts the seconds of its sinks.
        parts: Other counts, by name.
    """

    def __init__(self, report: Reporter, parts: Mapping[str, Stateful]) -> None:
        self._report, self._parts, self._earlier_cpu_s = report, dict(parts), 0.0

    @property
    def cpu_seconds(self) -> float:
        """CPU time of this process and of those before it."""
        return self._earlier_cpu_s + time.process_time()

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can hold without loss."""
        own = {"cpu_seconds": self.cpu_seconds, "report_seconds": self._report.seconds}
        return own | {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the values of :meth:`state_dict` before the first step; older checkpoints have none."""
        self._earlier_cpu_s = state.get("cpu_seconds", 0.0)
        self._report.seconds += state.get("report_seconds", 0.0)
        for name, part in self._parts.items():
            if name in state:
                part.load_state_dict(state[name])

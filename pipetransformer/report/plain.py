"""The run as lines of plain text, for log files and batch systems."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from pipetransformer.report import text
from pipetransformer.report.progress import Progress
from pipetransformer.report.reporter import Sink, Values

QUIET_S = 10.0  # longest time without a step line


class PlainLog(Sink):
    """Prints what happens as it happens, and of the steps some.

    Args:
        log_every_steps: Steps between two step lines. One is printed as well at the end of each epoch, and when about
            10 seconds have passed without one.
    """

    def __init__(self, log_every_steps: int) -> None:
        self._log_every_steps = log_every_steps
        self._last_logged = 0
        self._warned: set[str] = set()

    def write(self, event: str, values: Values) -> None:
        for line in getattr(self, f"_{event}")(values):
            print(f"[{datetime.now():%H:%M:%S}] {line}", flush=True)

    def close(self) -> None:
        pass

    def _start(self, values: Values) -> Iterable[str]:
        self._progress = Progress(values)
        return _lines(text.start_rows(values))

    def _step(self, values: Values) -> Iterable[str]:
        self._progress.step(values)
        if not self._due(values):
            return []
        step = self._last_logged = values["step"]
        return [
            f"step {step}/{self._progress.num_steps}  {self._progress.status(values)}  left {self._progress.left(step)}"
        ]

    def _due(self, values: Values) -> bool:
        step = values["step"]
        quiet_s = (step - self._last_logged) * values["step_seconds"]
        return step % self._log_every_steps == 0 or self._progress.ends_epoch(step) or quiet_s >= QUIET_S

    def _decision(self, values: Values) -> Iterable[str]:
        yield text.decision_line(values)
        yield f"gradient norms per block: {' '.join(text.gradient_norms(values['gradient_norms']))}"

    def _transition(self, values: Values) -> Iterable[str]:
        self._progress.transition(values)
        changes = text.transition_changes(values["before"], values["after"])
        changed = [f"{label} {before} -> {after}" for label, before, after in changes if before != after]
        costs = [f"{label} {words}" for label, words in text.transition_costs(values)]
        return ["; ".join([text.transition_title(values), *changed, *costs])]

    def _cache_fill(self, values: Values) -> Iterable[str]:
        return [text.cache_fill_line(values)]

    def _evaluate(self, values: Values) -> Iterable[str]:
        return [text.evaluation_line(values)]

    def _phase(self, values: Values) -> Iterable[str]:
        yield values["message"]

    def _warning(self, values: Values) -> Iterable[str]:
        message = values["message"]
        if message not in self._warned:
            self._warned.add(message)
            yield f"warning: {message}"

    def _summary(self, values: Values) -> Iterable[str]:
        return [*_lines(text.summary_rows(values)), *map(text.plan_line, values.get("plans", []))]


def _lines(rows: Iterable[text.Row]) -> list[str]:
    return [f"{label}: {words}" for label, words in rows]

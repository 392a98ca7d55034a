"""The run as lines of plain text, for log files and batch systems."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from pipetransformer.report import summary_text, text
from pipetransformer.report.format import Progress
from pipetransformer.report.run_folder import next_steps
from pipetransformer.report.sinks import EventName, Handlers, Sink, Values, handlers


class PlainLog(Sink):
    """Prints events as they happen, and of the steps a few: by time, and the last one.

    Args:
        log_every_s: Seconds between two step lines.
        log_every_steps: Steps between two step lines, in addition.
        clock: Seconds since any fixed moment.
    """

    def __init__(
        self, log_every_s: float, log_every_steps: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log_every_s, self._log_every_steps, self._clock = log_every_s, log_every_steps, clock
        self._last_logged_s = clock()
        self._warned: set[str] = set()
        self._run_dir: Path | None = None
        self._handlers: Handlers[Iterable[str]] = handlers(self)

    def write(self, event: EventName, values: Values) -> None:
        for line in self._handlers[event](values):
            print(f"[{datetime.now():%H:%M:%S}] {line}", flush=True)

    def close(self) -> None:
        pass

    def _phase(self, values: Values) -> Iterable[str]:
        return [f"{values['message']} ..."]

    def _start(self, values: Values) -> Iterable[str]:
        self._progress = Progress(values)
        self._last_logged_s, self._run_dir = self._clock(), Path(values["run_dir"])
        return _lines(text.start_rows(values))

    def _resume(self, values: Values) -> Iterable[str]:
        return [text.resume_line(values), *self._start(values)]

    def _step(self, values: Values) -> Iterable[str]:
        self._progress.step(values)
        step = values["step"]
        if not self._is_due(step):
            return []
        self._last_logged_s = self._clock()
        parts = [f"step {step}/{self._progress.num_steps}", self._progress.status(values), self._progress.left(step)]
        return ["  ".join(part for part in parts if part)]

    def _is_due(self, step: int) -> bool:
        is_quiet = self._clock() - self._last_logged_s >= self._log_every_s
        is_multiple = self._log_every_steps is not None and step % self._log_every_steps == 0
        return is_quiet or is_multiple or step == self._progress.num_steps

    def _plan_timed(self, values: Values) -> Iterable[str]:
        return [text.timed_line(values)]

    def _decision(self, values: Values) -> Iterable[str]:
        yield text.decision_line(values)
        if any(values["gradient_norms"]):
            yield f"gradient norms per block: {' '.join(text.gradient_norms(values['gradient_norms']))}"
        yield from text.signal_lines(values)

    def _transition(self, values: Values) -> Iterable[str]:
        changes = [f"{label} {before} -> {after}" for label, before, after in text.transition_changes(values)]
        if why := text.new_plan_line(values):
            yield why
        yield f"transition at step {values['step']:,}: {'; '.join(changes) or 'arrangement kept'}"
        for label, words in text.transition_rows(values, self._progress.world_size):
            yield f"  {label}: {words}"
        self._progress.transition(values)

    def _cache_plan(self, values: Values) -> Iterable[str]:
        return [text.cache_plan_line(values)]

    def _cache_fill(self, values: Values) -> Iterable[str]:
        return [text.cache_fill_line(values)]

    def _evaluate(self, values: Values) -> Iterable[str]:
        best = ", the best so far" if self._progress.evaluation(values) else ""
        return [text.evaluation_line(values) + best]

    def _checkpoint(self, _: Values) -> Iterable[str]:
        return []  # the summary counts them

    def _warning(self, values: Values) -> Iterable[str]:
        message = values["message"]
        if message not in self._warned:
            self._warned.add(message)
            yield f"warning: {message}"

    def _summary(self, values: Values) -> Iterable[str]:
        yield from _lines(summary_text.summary_rows(values))
        yield from map(summary_text.plan_line, values.get("plans", []))
        yield from _lines(next_steps(self._run_dir, values) if self._run_dir else [])


def _lines(rows: Iterable[text.Row]) -> list[str]:
    return [f"{label}: {words}" for label, words in rows]

"""The run on a terminal: live lines at the bottom, and above them what has happened.

A run of usual length fits one screen::

    vit_tiny_patch16_224: 674,410 parameters, 6 blocks; digits, classification
    45 steps per epoch x 40 epochs = 1,800 steps; 1 stage x 2 replicas = 2 devices, 43 ms per step predicted
    freeze at step 540: 0 -> 2 of 6 blocks (at most a third of the active blocks)
      arrangement kept, block 2 from the cache: 43 ms -> 27 ms per step predicted, took 200 ms
    step 563/1800 ━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━ 31 %  left 34 s
    epoch 12.5/40  loss 0.21  1180 samples/s  test accuracy 0.94  2/6 frozen, 2 cached  1 stage x 2 replicas

With ``verbose=true`` there is a panel for the start and for each transition, and a line for each fill and evaluation.
"""

from __future__ import annotations

from pathlib import Path

import rich.console
import rich.progress
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipetransformer.report import summary_text, text
from pipetransformer.report.format import Progress
from pipetransformer.report.reporter import erase_phase, show_phase
from pipetransformer.report.run_folder import next_steps
from pipetransformer.report.sinks import EventName, Handlers, Sink, Values, handlers

BARS = "▁▂▃▄▅▆▇█"
NUM_EVALUATIONS = 5  # lines of a run at most, those of new best values, unless verbose; the live line has all


class Terminal(Sink):
    """Shows events with rich.

    Args:
        console: Where to draw.
        verbose: Shows all there is to know about each event.
    """

    def __init__(self, console: rich.console.Console, verbose: bool = False) -> None:
        self._console, self._verbose = console, verbose
        self._evaluated_at: int | None = None  # the step of the last evaluation that is shown
        self._shows_phase = True  # the launcher's
        self._warned: set[str] = set()
        self._run_dir: Path | None = None
        self._decision_values: Values = {}
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed}/{task.total}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.percentage:.0f} %  {task.fields[left]}"),
            expand=True,
        )
        self._live = Live(console=console, refresh_per_second=4, transient=not verbose)
        self._handlers: Handlers[None] = handlers(self)

    def write(self, event: EventName, values: Values) -> None:
        if event != "phase" and self._shows_phase:
            erase_phase(self._console.file)
            self._shows_phase = False
        self._handlers[event](values)

    def close(self) -> None:
        self._live.stop()

    def _phase(self, values: Values) -> None:
        # a line and no spinner, whose thread would disturb what is measured
        show_phase(values["message"], self._console.file, self._console.width)
        self._shows_phase = True

    def _start(self, values: Values) -> None:
        self._progress, self._run_dir = Progress(values), Path(values["run_dir"])
        self._task = self._bar.add_task("steps", total=self._progress.num_steps, left="")
        if self._verbose:
            self._console.print(Panel(_grid(text.start_rows(values)), title="pipetransformer", title_align="left"))
        else:
            for line in text.start_lines(values):
                self._console.print(escape(line), highlight=False)
        self._live.update(self._bar)
        self._live.start()

    def _resume(self, values: Values) -> None:
        self._console.print(escape(text.resume_line(values)))
        self._start(values)
        self._bar.update(self._task, completed=values["step"])

    def _step(self, values: Values) -> None:
        self._progress.step(values)
        self._bar.update(self._task, completed=values["step"], left=self._progress.left(values["step"]))
        status = [
            Text("  ".join(parts)) for parts in (self._progress.learning(values), self._progress.topology(values))
        ]
        self._live.update(Group(self._bar, *status))

    def _plan_timed(self, values: Values) -> None:
        if self._verbose:
            self._console.print(escape(text.timed_line(values)), highlight=False)

    def _decision(self, values: Values) -> None:
        if values["bound"] != "guard":
            self._decision_values = values
        self._console.print(escape(text.decision_line(values)))
        for line in text.signal_lines(values) if self._verbose else ():
            self._console.print(f"  {escape(line)}", highlight=False)

    def _transition(self, values: Values) -> None:
        self._progress.transition(values)
        if why := text.new_plan_line(values):
            self._console.print(escape(why), highlight=False)
        if not self._verbose:
            self._console.print(f"  {escape(text.transition_line(values))}", highlight=False)
            return
        parts: list[RenderableType] = []
        if self._decision_values.get("step") == values["step"]:
            parts += [_norms(self._decision_values["gradient_norms"]), Text()]
        if changes := text.transition_changes(values):
            parts += [_changes(changes), Text()]
        parts.append(_grid(text.transition_rows(values, self._progress.world_size)))
        self._console.print(Panel(Group(*parts), title=text.transition_title(values), title_align="left"))

    def _cache_plan(self, values: Values) -> None:
        if self._verbose or not values["from_level"]:
            self._console.print(escape(text.cache_plan_line(values)), highlight=False)

    def _cache_fill(self, values: Values) -> None:
        if self._verbose:
            self._console.print(escape(text.cache_fill_line(values)))

    def _evaluate(self, values: Values) -> None:
        is_best, step = self._progress.evaluation(values), values["step"]
        apart = self._progress.num_steps / NUM_EVALUATIONS
        is_news = self._evaluated_at is None or step - self._evaluated_at >= apart
        if self._verbose or (is_best and is_news):
            self._evaluated_at = step
            self._console.print(escape(text.evaluation_line(values)), style="bold" if is_best else None)

    def _checkpoint(self, _: Values) -> None:
        """Shows nothing: the summary counts them."""

    def _warning(self, values: Values) -> None:
        message = values["message"]
        if message not in self._warned:
            self._warned.add(message)
            self._console.print(f"[yellow]warning:[/] {escape(message)}")

    def _summary(self, values: Values) -> None:
        self._live.stop()
        if self._verbose:
            parts: list[RenderableType] = [_grid(summary_text.summary_rows(values))]
            if values.get("plans"):
                parts += [Text(), _plans(values["plans"])]
            self._console.print(Panel(Group(*parts), title="summary", title_align="left"))
        else:
            self._console.print(_grid(summary_text.summary_rows(values)))
        for label, words in next_steps(self._run_dir, values) if self._run_dir else []:
            # not broken by the terminal's width, so that it can be copied
            self._console.print(f"[bold]{label}:[/] {escape(words)}", soft_wrap=True, highlight=False)


def _grid(rows: list[text.Row]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for label, words in rows:
        grid.add_row(label, escape(words))
    return grid


def _changes(changes: list[text.Change]) -> Table:
    table = Table("", "before", "after", box=None, padding=(0, 2, 0, 0))
    for label, old, new in changes:
        table.add_row(Text(label, style="bold"), old, Text(new, style="green"))
    return table


def _norms(norms: list[float | None]) -> RenderableType:
    """Draws a bar and a number for each block."""
    largest = max((norm or 0.0 for norm in norms), default=0.0) or 1.0
    bars = [BARS[round((len(BARS) - 1) * norm / largest)] if norm else " " for norm in norms]
    cells = zip(bars, text.gradient_norms(norms), strict=True)
    blocks = Columns(
        [f"{block:>2} {bar} {number}" for block, (bar, number) in enumerate(cells, start=1)], padding=(0, 2)
    )
    return Group(Text("gradient norm per block", style="bold"), blocks)


def _plans(plans: list[Values]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), title="plans", title_justify="left")
    for column in summary_text.PLAN_COLUMNS:
        is_long = column == "layers per stage"  # breaks between stages; a number never breaks
        table.add_column(column, justify="left" if is_long else "right", no_wrap=not is_long, min_width=len(column))
    for plan in plans:
        table.add_row(*summary_text.plan_row(plan))
    return table

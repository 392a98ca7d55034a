"""The run as a person follows it: drawn on a terminal, printed as lines anywhere else."""

from __future__ import annotations

import rich.console

from pipetransformer.report.plain import PlainLog
from pipetransformer.report.reporter import Sink, Values
from pipetransformer.report.terminal import Terminal


class Console(Sink):
    """Standard output.

    Args:
        log_every_steps: Steps between two step lines where it is not a terminal.
    """

    def __init__(self, log_every_steps: int) -> None:
        console = rich.console.Console(emoji=False)
        self._view = Terminal(console) if console.is_terminal else PlainLog(log_every_steps)

    def write(self, event: str, values: Values) -> None:
        self._view.write(event, values)

    def close(self) -> None:
        self._view.close()

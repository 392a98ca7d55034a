"""Opens the report of a run on rank 0: files, console, tracking service."""

from pathlib import Path
from typing import Any

from pipetransformer.report.console import Console
from pipetransformer.report.reporter import LoggerSpec, Reporter
from pipetransformer.report.run_folder import ENVIRONMENT, EVENT_LOG, JsonLines, environment, write_json


def open_report(
    logger: LoggerSpec, log_every_steps: int, run_dir: Path, config: dict[str, Any], sweep: str | None
) -> Reporter:
    """Writes ``env.json`` and opens every sink.

    Args:
        config: The composed configuration, for the tracking service.
        sweep: Group of the runs of one sweep there.
    """
    write_json(run_dir / ENVIRONMENT, environment())
    tracker = logger.open(run_dir, config, sweep)
    return Reporter([JsonLines(run_dir / EVENT_LOG), Console(log_every_steps), tracker])

"""Weights & Biases, offline unless asked otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipetransformer.errors import UserError
from pipetransformer.report.charts import charts, step_of, without_idle_gains
from pipetransformer.report.decisions import (
    DECISION_COLUMNS,
    TRANSITION_COLUMNS,
    decision_rows,
    is_of_the_guard,
    transition_rows,
)
from pipetransformer.report.environment import by_option, makes_arm, read_overrides
from pipetransformer.report.event_log import EVENT_LOG, read_events
from pipetransformer.report.reporter import LoggerSpec, check_share
from pipetransformer.report.secrets import redact
from pipetransformer.report.sinks import MAX_SHARE, EventName, NullSink, Sink, Thinned, Values
from pipetransformer.report.text import flatten

if TYPE_CHECKING:
    from wandb import Run

INIT_TIMEOUT_S = 30.0
MAX_NAME = 128  # characters that wandb takes
MULTIRUN, MAX_DEPTH = "multirun.yaml", 3  # in the folder of a sweep, at most so many above that of a job
TABLES_EVERY_S = 60.0
MODES = ("offline", "online")
OF_AN_END = ("error", "stopped_early/step", "stopped_early/reason")
"""Values of the summary that one end of a run has and another has not."""


@dataclass(frozen=True, kw_only=True)
class NoLogger(LoggerSpec):
    """No tracking service; the files in the run folder are written nevertheless."""

    def open(
        self,
        run_dir: Path,
        config: dict[str, Any],
        group_default: str | None = None,
        resumed: dict[str, Any] | None = None,
    ) -> Sink:
        return NullSink()


@dataclass(frozen=True, kw_only=True)
class WandbLogger(LoggerSpec):
    """One wandb run per training run.

    Attributes:
        project: Where the runs are listed.
        mode: ``offline`` keeps the files under ``<run folder>/wandb``, ``online`` also sends them.
        entity: User or team; ``None`` takes the account's own.
        group: Runs shown together; ``None`` takes the sweep, if there is one.
        name: Name of the run; ``None`` takes the options of a sweep's job, and lets wandb find one for other runs.
        tags: Labels to filter by.
        max_share: Largest part of a run's time that the service may take; where steps are too fast for it, it gets
            fewer of them, and ``metrics.jsonl`` has all. ``None`` sends every step.
    """

    project: str = "pipetransformer"
    mode: str = "offline"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    max_share: float | None = MAX_SHARE

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"logger.mode={self.mode} is not one of {', '.join(MODES)}; logger=none turns it off")
        check_share(self.max_share)

    def open(
        self,
        run_dir: Path,
        config: dict[str, Any],
        group_default: str | None = None,
        resumed: dict[str, Any] | None = None,
    ) -> Sink:
        with ExitStack() as closing:
            closing.enter_context(_folders_in(run_dir / "wandb"))
            run = self._start(run_dir, config, group_default, (resumed or {}).get("wandb_id"))
            every_s = 0.0 if self.max_share is None else TABLES_EVERY_S
            sink = WandbSink(run, run_dir / EVENT_LOG, every_s, closing=closing.pop_all())
        return Thinned(sink, self.max_share)

    def _start(self, run_dir: Path, config: dict[str, Any], sweep: str | None, run_id: str | None) -> Run:
        import wandb

        job, arm = _names(run_dir) if sweep else (None, None)
        settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT_S)
        wandb.setup(settings=settings)
        if self.mode == "online" and not wandb.login(prompt=False):
            raise self._refused("no API key was found; run `wandb login` first")
        try:
            with _redacted_command():
                return wandb.init(
                    project=redact(self.project),
                    mode=cast("Any", self.mode),
                    entity=redact(self.entity),
                    group=redact(self.group or sweep),
                    job_type=arm,
                    name=redact(self.name) or job,
                    tags=redact(self.tags),
                    dir=run_dir,
                    config=config,
                    id=run_id,
                    resume="allow" if run_id else None,
                    settings=settings,
                )
        except (wandb.Error, OSError) as error:
            raise self._refused(str(error)) from error

    def _refused(self, why: str) -> UserError:
        remedy = "logger.mode=offline keeps the data in the run folder, logger=none does without wandb"
        return UserError(f"wandb could not start with logger.mode={self.mode}: {why} ({remedy})")


def _names(run_dir: Path) -> tuple[str | None, str | None]:
    """Returns the options of a sweep's job as its name, and without the seed as that of its arm.

    Those come first in which the jobs of the sweep differ: a long name is cut.
    """
    given, fixed = by_option(read_overrides(run_dir) or []).values(), _of_all_jobs(run_dir)
    options = [one for one in given if makes_arm(one) or one.startswith("seed=")]
    options = redact(sorted(options, key=lambda one: _plain(one) in fixed))
    arm = [one for one in options if makes_arm(one)]
    return _one_name(options), _one_name(arm)


def _of_all_jobs(run_dir: Path) -> set[str]:
    """Returns the arguments of all jobs of a sweep, as :func:`_plain`, by the file that Hydra writes beside them."""
    import yaml

    files = (parent / MULTIRUN for parent in [*run_dir.resolve().parents][:MAX_DEPTH])
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return set()
    with suppress(yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError):  # another file of that name
        return {*map(_plain, yaml.safe_load(file.read_text(encoding="utf-8"))["hydra"]["overrides"]["task"])}
    return set()


def _plain(override: str) -> str:
    """Returns an argument as all its spellings are: Hydra sets blanks, and a job's has ``++`` where it may add."""
    return override.lstrip("+").replace(" ", "")


def _one_name(options: Sequence[str]) -> str | None:
    """Returns a name of options that is none of other ones, also where it is cut."""
    name = " ".join(options)
    if len(name) > MAX_NAME:
        digest = blake2b(name.encode(), digest_size=4).hexdigest()
        name = f"{name[: MAX_NAME - len(digest) - 2]}… {digest}"
    return name or None


@contextmanager
def _folders_in(folder: Path) -> Iterator[None]:
    """Keeps in a folder what wandb would put into the user's home: tables until they are sent, and logs.

    An offline run names the files of its tables by their paths, and a home may be another one where it is sent, or one
    that cannot be written, as in many containers.
    """
    own = {f"WANDB_{kind.upper()}_DIR": str(folder.resolve() / kind) for kind in ("data", "cache")}
    added = {name: path for name, path in own.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _redacted_command() -> Iterator[None]:
    """Hides keys and tokens in the arguments, which wandb writes to its metadata."""
    arguments = sys.argv
    sys.argv = redact(arguments)
    try:
        yield
    finally:
        sys.argv = arguments


class WandbSink(Sink):
    """Sends events to a wandb run as charts over the optimizer steps, and its decisions and transitions as two tables.

    A table is logged whole where a transition or the guard has something new, and at the end, so that a run shows its
    last state. A resumed run takes the rows before it from the event log, which has been cut to the step from which it
    goes on.

    Args:
        run: A started run.
        event_log: The events of the run, which a resumed one reads.
        tables_every_s: Seconds from one table to the next at least: each takes the service a fifth of a second.
        clock: Seconds since any fixed moment.
        closing: Is closed after the run.
    """

    def __init__(
        self, run: Run, event_log: Path, tables_every_s: float = 0.0, clock: Callable[[], float] = time.monotonic,
        closing: ExitStack | None = None,
    ) -> None:  # fmt: skip
        self._run, self._event_log, self._clock, self._closing = run, event_log, clock, closing or ExitStack()
        self._tables_every_s, self._tables_at, self._has_news = tables_every_s, clock(), False
        self._exit_code, self._num_rolled_back, self._step, self._is_resumed = 1, 0, 0, False
        self._decisions, self._transitions = list[Values](), list[Values]()
        run.define_metric("*", step_metric="step")

    def write(self, event: EventName, values: Values) -> None:
        """Takes an event. Its row is that of its step, so that wandb drops steps that a resumed run repeats; a run that
        the guard has rolled back adds rows, since it trains otherwise from there on."""
        self._num_rolled_back += values.get("num_steps_rolled_back", 0)
        if event in ("start", "resume"):
            self._run.config.update({event: values}, allow_val_change=True)
            self._is_resumed |= event == "resume"
        elif event == "summary":
            self._exit_code = 0 if values["status"] == "completed" else 1
            gone = dict.fromkeys(OF_AN_END) if self._is_resumed else {}  # the service still has those of the last end
            self._run.summary.update(gone | dict(flatten(without_idle_gains(values))))
        self._keep(event, values)
        self._has_news |= event in ("transition", "summary") or (event == "decision" and is_of_the_guard(values))
        is_due = event == "summary" or self._clock() - self._tables_at >= self._tables_every_s
        if row := charts(event, values) | (self._tables() if is_due else {}):
            # wandb drops rows of earlier steps: a warning has none, and a checkpoint that of when it was begun
            if ("step" in values and event != "checkpoint") or event == "summary":
                self._step = step_of(values)
            self._log(self._step, row)

    def _keep(self, event: EventName, values: Values) -> None:
        """Keeps what becomes a row of a table."""
        if event == "decision":
            self._decisions.append(values)
        elif event == "transition":
            self._transitions.append(values)
        elif event == "resume":
            with suppress(UserError, OSError):  # a damaged log costs the rows before, not the run
                self._decisions = read_events(self._event_log, "decision")
                self._transitions = read_events(self._event_log, "transition")

    def _tables(self) -> Values:
        """Returns the tables where they say something new, not at each decision: there may be thousands."""
        if not self._has_news:
            return {}
        from wandb import Table

        self._has_news, self._tables_at = False, self._clock()
        tables = {
            "tables/decisions": (DECISION_COLUMNS, decision_rows(self._decisions)),
            "tables/transitions": (TRANSITION_COLUMNS, [*transition_rows(self._transitions)]),
        }
        return {name: Table([*columns], rows) for name, (columns, rows) in tables.items() if rows}

    def identity(self) -> dict[str, Any]:
        return {"wandb_id": self._run.id}

    def close(self) -> None:
        """Logs what the tables lack of a run without a summary; marks it as failed unless one said otherwise."""
        with self._closing:
            try:
                if tables := self._tables():
                    self._log(self._step, tables)
            finally:
                self._run.finish(exit_code=self._exit_code)

    def _log(self, step: int, row: Values) -> None:
        self._run.log({"step": step, **row}, step=step + self._num_rolled_back)

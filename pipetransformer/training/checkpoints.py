"""The checkpoints of a run: when one is due, the snapshot at the step, and the writing behind it.

Ranks agree by the sums of a step, its loss among them, one step ahead, so that asking costs nothing::

    step s      rank 0 knows that one is due after step s + 1, and sends it along with the loss of step s
    step s + 1  every rank reads the loss of step s, and with it the request; copies its layers; goes on
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import PrefixStore

from pipetransformer.autodp.sampler import SampleOrder, batch_ids
from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder, Retention
from pipetransformer.checkpoint.manifest import Manifest
from pipetransformer.checkpoint.writer import CheckpointWriter, Written
from pipetransformer.config.schema import Config
from pipetransformer.errors import UserError
from pipetransformer.planning.state import TrainState
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.environment import library_versions, read_overrides
from pipetransformer.report.event_log import EVENT_LOG
from pipetransformer.report.reporter import Reporter
from pipetransformer.report.secrets import redact
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import broadcast_from_rank0, own_store
from pipetransformer.training.build import RunComponents
from pipetransformer.training.main_metric import MainMetric
from pipetransformer.training.position import inside
from pipetransformer.training.resume import data_digest, settings_of


class Checkpoints:
    """One rank's checkpoints of a run. Without them nothing happens.

    Args:
        config: Gives the intervals and what stays.
        runtime: Gives the layers.
        timeline: Steps of the run.
        order: Of the training samples.
        metric: Of the run; checkpoints of the best weights stay.
        spent: Returns the other counts of the summary so far.
        about: Entries of the manifest that stay the same during the run.
        report: Receives each checkpoint, and a warning for one that could not be written.
        run_dir: The run folder.

    Attributes:
        folder: The checkpoints on disk.
        saved_step: Step of the last one that was begun; ``None`` before the first.
    """

    def __init__(
        self, config: Config, runtime: ElasticRuntime, timeline: Timeline, order: SampleOrder, about: dict[str, Any],
        report: Reporter, run_dir: Path, metric: MainMetric, spent: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        self._metric, self._spent = metric, spent
        self._options, self._config, self._timeline, self._order = config.checkpoint, config, timeline, order
        self._runtime, self._about, self._report, self._run_dir = runtime, about, report, run_dir
        token = broadcast_from_rank0(uuid4().hex[:8])
        store = PrefixStore(f"checkpoints/{token}", own_store())
        self.folder = CheckpointFolder(run_dir / FOLDER, token)
        world = dist.get_rank(), dist.get_world_size()
        self._writer = CheckpointWriter(self.folder, *world, config.parallel.timeout_s, store)
        if dist.get_rank() == 0:
            self.folder.discard()  # of a run that was killed
        self._started_s = self._saved_s = time.monotonic()
        self.saved_step: int | None = None
        self._figures = {"num_saved": 0, "wait_seconds": 0.0, "write_seconds": 0.0, "bytes": 0}

    def wants(self, step: int) -> bool:
        """Returns whether this rank asks all others for a checkpoint after ``step`` steps; only rank 0 does."""
        options = self._options
        if not options.enabled or dist.get_rank() != 0 or self._writer.in_flight:
            return False
        is_epochs_end = step % self._timeline.steps_per_epoch == 0
        minutes = (time.monotonic() - self._saved_s) / 60
        return is_epochs_end or (options.every_minutes is not None and minutes >= options.every_minutes)

    def is_due(self, step: int, requested: bool) -> bool:
        """Returns whether one is written after ``step`` steps: asked for, a multiple of the interval, or the end."""
        options = self._options
        is_multiple = options.every_steps is not None and step % options.every_steps == 0
        return options.enabled and (requested or is_multiple or step == self._timeline.num_steps)

    def save(self, state: TrainState) -> None:
        """Copies the layers of this rank, and begins to write them. Collective with FSDP.

        Args:
            state: Of the run; its step is between two steps.
        """
        with inside("saving", state.step):
            self._save(state)

    def _save(self, state: TrainState) -> None:
        start = time.perf_counter()
        self._writer.wait()  # at most one in flight
        self.report_written()
        copies = self._runtime.snapshot()
        stack, log = self._runtime.resident.stack, self._run_dir / EVENT_LOG
        self._report.flush()  # a resumed run keeps the log up to here
        goodness, best_step = self._metric.goodness, self._metric.best_step
        manifest = Manifest(
            step=state.step,
            layers=(),
            train=state.state_dict(),
            log_bytes=_flushed_size(log) if dist.get_rank() == 0 else 0,
            sample_ids=next_batch_digest(state, self._timeline, self._order),
            metric=goodness if goodness is not None and math.isfinite(goodness) else None,
            seconds=self._about["seconds"] + time.monotonic() - self._started_s,
            spent=self._spent(),
            **{name: value for name, value in self._about.items() if name != "seconds"},
        )
        pinned = set() if state.guard.watched is None else {state.guard.watched.step}
        pinned |= {best_step} if self._config.evaluate.save == "best" and best_step is not None else set()
        retention = Retention(self._options.keep, self._options.keep_best, frozenset(pinned))
        named = {layer: (stack[layer].prefix, tensors) for layer, tensors in copies.items()}
        self._writer.start(named, manifest, retention)
        self._saved_s, self.saved_step = time.monotonic(), state.step
        self._figures["wait_seconds"] += time.perf_counter() - start

    def go_back_to(self, step: int) -> None:
        """Removes what was saved after a step from which the run goes on. Every rank calls it."""
        self.wait()
        self.saved_step = None
        if dist.get_rank() == 0:
            self.folder.remove_after(step)

    def report_written(self) -> None:
        """Reports a checkpoint whose writing has ended, on rank 0."""
        written = self._writer.take_outcome()
        if written is not None:
            self._report_end(written)

    def _report_end(self, written: Written) -> None:
        if written.path is None:
            message, last = f"the checkpoint of step {written.step} was not written: {written.error}", self._last()
            is_full = any(os.strerror(number) in written.error for number in (errno.ENOSPC, errno.EDQUOT))
            where = f"make room in {self.folder.path}, where" if is_full else f"in {self.folder.path}"
            self._report.write("warning", message=f"{message}; {where} {last}")
            return
        if written.error:
            message = f"checkpoints that need not stay could not be removed ({written.error}); remove them by hand"
            self._report.write("warning", message=message)
        self._figures["num_saved"] += 1
        self._figures["write_seconds"] += written.seconds
        self._figures["bytes"] = written.num_bytes
        self._report.write(
            "checkpoint",
            step=written.step,
            path=str(written.path),
            seconds=written.seconds,
            bytes=written.num_bytes,
        )

    def _last(self) -> str:
        step = self.folder.newest_step
        return "there is none yet: the run could not go on" if step is None else f"that of step {step} is the last one"

    def wait(self) -> None:
        """Waits until the one in flight is published, and reports it."""
        self._writer.wait()
        self.report_written()

    def wait_for_all(self) -> Path:
        """Waits on every rank until the one in flight is published. Collective.

        Raises:
            UserError: It could not be written, on every rank.
        """
        self._writer.wait()
        written = broadcast_from_rank0(self._writer.take_outcome())
        assert written is not None, "rank 0 has written"
        self._report_end(written)
        if written.path is None:
            raise UserError(f"the checkpoint of step {written.step} was not written: {written.error}")
        return written.path

    def close(self, give_up: bool) -> None:
        """Ends the writing.

        Args:
            give_up: The run has failed, so that other ranks may never write their layers.
        """
        self._writer.close(give_up)
        self.report_written()

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`figures` counts, with the checkpoint that is being written."""
        return self._figures | {"num_saved": self._figures["num_saved"] + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the values of :meth:`state_dict`."""
        self._figures |= state

    def figures(self) -> dict[str, Any]:
        """Returns number, size and times of this run's checkpoints for the summary; empty where there are none."""
        return self._figures if self._options.enabled else {}


def _flushed_size(log: Path) -> int:
    """Returns the size of the log when it is on disk, as the files of a checkpoint are; 0 where there is none."""
    if not log.is_file():
        return 0
    with log.open("rb") as file:
        with suppress(OSError):  # a disk that takes nothing more costs the lines that it does not have
            os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def about_run(config: Config, components: RunComponents, report: Reporter, run_dir: Path) -> dict[str, Any]:
    """Returns the entries of a manifest that stay the same during the run; empty where none is written."""
    if not config.checkpoint.enabled or dist.get_rank() != 0:
        nothing: dict[str, Any] = {name: {} for name in ("settings", "data", "cache", "versions", "logger")}
        return nothing | {"overrides": None, "seconds": 0.0}
    resumed = components.resumed
    return {
        "settings": settings_of(config),
        "overrides": redact(read_overrides(run_dir)),
        "data": data_digest(components.data.train) if resumed is None else resumed.data,
        "cache": {"storage": config.cache.storage, "path": config.cache.path} if config.cache.enabled else {},
        "versions": library_versions(),
        "logger": report.identity(),
        "seconds": 0.0 if resumed is None else resumed.checkpoint.manifest.seconds,
    }


def next_batch_digest(state: TrainState, timeline: Timeline, order: SampleOrder) -> str:
    """Returns a digest of the sample ids of the next global batch; empty at the end of the run."""
    if state.step >= timeline.num_steps:
        return ""
    ids = batch_ids(order.epoch(state.epoch), state.step_in_epoch, timeline.batch_size)
    return blake2b(ids.astype("<i8").tobytes(), digest_size=16).hexdigest()

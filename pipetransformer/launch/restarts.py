"""Restarts of a run whose ranks died: whether, with how many ranks, and from which step."""

import os
from dataclasses import replace
from pathlib import Path

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.config.schema import Config
from pipetransformer.errors import CacheLost, RankFailed, RankLost


class Restarts:
    """The restarts that a run has left.

    Args:
        config: Of the run.
        run_dir: The run folder, which is looked at for checkpoints.
        num_ranks: Ranks of the first start.

    Attributes:
        config: With which the ranks are to be started.
        num_ranks: Ranks to be started.
    """

    def __init__(self, config: Config, run_dir: Path, num_ranks: int) -> None:
        self.config, self.num_ranks = config, num_ranks
        self._folder, self._num_done, self._last = CheckpointFolder(run_dir / FOLDER), 0, ("", -1)
        self._limit = config.num_restarts

    @property
    def step(self) -> int:
        """Step of the newest checkpoint; 0 where there is none."""
        return self._folder.newest_step or 0

    def next_after(self, error: RankLost | RankFailed | CacheLost) -> bool:
        """Returns whether the ranks are started again, and prepares it.

        An error that is no accident ends the run: one before the first checkpoint, or the same one as before at the
        same step. After a failure of the cache the run goes on without it, unless it requires it.
        """
        if self._num_done == self._limit:
            return False
        if isinstance(error, CacheLost):
            if self.config.cache.require:
                return False
            self.config = replace(self.config, cache=replace(self.config.cache, enabled=False))
        if isinstance(error, RankFailed):
            if self.step == 0 or self._last == (error.line, self.step):
                return False
            self._last = error.line, self.step
        elif isinstance(error, RankLost) and self.config.launch.shrink:
            self.num_ranks = max(1, self.num_ranks - error.num_lost)
        self._num_done += 1
        self.config = from_checkpoint(self.config)
        if self.config.parallel.world_size is not None:
            self.config = replace(self.config, parallel=replace(self.config.parallel, world_size=self.num_ranks))
        return True

    def announcement(self, error: RankLost | RankFailed | CacheLost) -> str:
        """Returns the line that tells of the restart."""
        cause = error.line if isinstance(error, RankFailed) else str(error).partition(",")[0]
        start = f"from step {self.step:,}" if self.step else "from the beginning"
        if isinstance(error, CacheLost):
            cause, start = str(error).partition(";")[0], f"{start} and without the cache"
        count = f"{self.num_ranks} process" + "es" * (self.num_ranks != 1)
        return f"{cause}; restart {self._num_done} of {self._limit} with {count}, {start}"


def after_restart(config: Config) -> Config:
    """Returns the configuration with which to go on where torchrun has started all ranks again."""
    return from_checkpoint(config) if is_restarted() else config


def is_restarted() -> bool:
    """Returns whether torchrun has started all ranks again after one has died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def from_checkpoint(config: Config) -> Config:
    """Returns the configuration of a run that goes on from its newest checkpoint, or starts where there is none."""
    return replace(config, resume=replace(config.resume, run="auto"))

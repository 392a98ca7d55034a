"""The checkpoints of a run on disk: staged, published by one rename, pruned, and verified.

A crash at any moment leaves a published checkpoint that is whole, or none::

    .staging-00000120-5f0c3a91-3/ layer files, each flushed by the rank that writes it
        manifest.json             by rank 0, when all ranks have told it that they are done; flushed, then the folder
    step-00000120/                the same folder after the rename
    .replaced-00000120/           an earlier one of that step, until the new one has its name
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipetransformer.checkpoint.manifest import LayerFile, Manifest, digest_of, read_manifest
from pipetransformer.errors import DamagedCheckpoint

FOLDER = "checkpoints"
_PUBLISHED, _REPLACED = re.compile(r"step-\d{8,}"), re.compile(r"\.replaced-\d{8,}")
_STAGED = re.compile(r"\.staging-\d{8,}-[0-9a-f]{8}(-\d+)?")  # earlier releases wrote no number


@dataclass(frozen=True)
class Retention:
    """The published checkpoints that stay.

    Attributes:
        keep: Newest ones, at least 1.
        keep_best: Ones with the best metric, in addition.
        pinned: Steps of those that stay whatever their age.
    """

    keep: int = 2
    keep_best: int = 1
    pinned: frozenset[int] = frozenset()


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: The folder that holds them; it need not exist.
        token: Eight hexadecimal digits that all ranks of a run share and no other run has: a rank then never writes
            into what a killed run left behind.
    """

    def __init__(self, path: Path, token: str = "0" * 8) -> None:
        self.path, self._token = path, token

    def staging(self, step: int, number: int = 1) -> Path:
        """Returns the folder in which a checkpoint is written.

        Args:
            number: Of the checkpoint in this start of the run. A step may be saved twice, and a rank begins the second
                time while another one still publishes the first.
        """
        return self.path / f".staging-{step:08d}-{self._token}-{number}"

    @property
    def newest_step(self) -> int | None:
        """Step of the newest published checkpoint; ``None`` where there is none."""
        published = self.published()
        return _step_of(published[-1]) if published else None

    def published(self) -> list[Path]:
        """Returns the published checkpoints, the newest last; of a step whose new one has no name yet, the old one."""
        if not self.path.is_dir():
            return []
        paths = [path for path in self.path.iterdir() if _matches(path, _PUBLISHED, _REPLACED)]
        paths = sorted(path for path in paths if path.is_dir() and not path.is_symlink())  # a dot is before a letter
        found = {_step_of(path): path for path in paths}
        return [found[step] for step in sorted(found)]

    def discard(self) -> None:
        """Removes all staging folders, and checkpoints that have been replaced."""
        published = self.published()
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if _matches(path, _STAGED) or (_matches(path, _REPLACED) and path not in published):
                shutil.rmtree(path, ignore_errors=True)

    def publish(self, staging: Path, step: int) -> Path:
        """Renames a staging folder that holds all of a checkpoint; flushes both folders.

        A published one of the same step is replaced, and counts until the new one has its name.
        """
        final, replaced = self.path / f"step-{step:08d}", self.path / f".replaced-{step:08d}"
        _flush_folder(staging)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)  # left by a run that was killed
            final.rename(replaced)
        staging.rename(final)
        _flush_folder(self.path)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def prune(self, retention: Retention, step: int) -> list[Path]:
        """Removes published checkpoints that need not stay; never the newest whole one.

        Args:
            step: Of the last one that was published. Those of later steps count for nothing, and stay: the run could
                not go on from them.

        Returns:
            Those that were removed.
        """
        metrics: dict[Path, float | None] = {}
        for path in (path for path in self.published() if _step_of(path) <= step):
            try:
                metrics[path] = read_manifest(path).metric
            except DamagedCheckpoint:  # it stays for the user to look at, and counts for nothing
                continue
        newest = list(metrics)[-max(1, retention.keep) :]
        scored = [path for path, metric in metrics.items() if metric is not None]
        best = sorted(scored, key=lambda path: (metrics[path], path.name), reverse=True)[: retention.keep_best]
        stays = {*newest, *best} | {path for path in metrics if _step_of(path) in retention.pinned}
        removed = [path for path in metrics if path not in stays]
        for path in removed:
            self._remove(path)
        return removed

    def remove_after(self, step: int) -> None:
        """Removes the published checkpoints of later steps: the run has been rolled back."""
        for path in self.published():
            if _step_of(path) > step:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Removes a published checkpoint: unpublished first, so that a crash leaves none that is half there."""
        hidden = path.rename(self.staging(_step_of(path), 0))
        shutil.rmtree(hidden, ignore_errors=True)


def _matches(path: Path, *patterns: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(path.name) for pattern in patterns)


def _step_of(published: Path) -> int:
    return int(published.name.rpartition("-")[2])


def write_flushed(path: Path, content: bytes | memoryview) -> None:
    """Writes a file and waits until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    """Waits until a folder's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_files(folder: Path, layers: Iterable[LayerFile]) -> None:
    """Compares files of a checkpoint with their digests.

    Raises:
        DamagedCheckpoint: A file is missing, or has another size or digest.
    """
    for layer in layers:
        read_file(folder, layer)


def problem_with(folder: Path, layers: Iterable[LayerFile]) -> str | None:
    """Returns what is wrong with files of a checkpoint, see :func:`check_files`; ``None`` where they are whole."""
    try:
        check_files(folder, layers)
    except DamagedCheckpoint as error:
        return str(error)
    return None


def read_file(folder: Path, layer: LayerFile) -> bytes:
    """Reads a layer's file and compares it with its digest.

    Raises:
        DamagedCheckpoint: It is missing, or has another size or digest.
    """
    path = folder / layer.name
    try:
        if path.stat().st_size != layer.num_bytes:
            raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, {layer.num_bytes} were written")
        content = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from None
    if digest_of(content) != layer.digest:
        raise DamagedCheckpoint(f"{path} is damaged: its digest does not fit")
    return content


Opened = tuple[Path, Manifest | DamagedCheckpoint]
"""A published checkpoint with its manifest, or why it has none."""


def open_checkpoints(folder: Path) -> Sequence[Opened]:
    """Returns the published checkpoints of a run, the newest first."""
    found: list[Opened] = []
    for path in reversed(CheckpointFolder(folder).published()):
        try:
            found.append((path, read_manifest(path)))
        except DamagedCheckpoint as error:
            found.append((path, error))
    return found


def newest_whole(
    opened: Iterable[Opened], step: int | None, problem: Callable[[Path, Sequence[LayerFile]], str | None]
) -> tuple[tuple[Path, Manifest] | None, list[str]]:
    """Finds the newest checkpoint with which nothing is wrong.

    Args:
        opened: Checkpoints, the newest first.
        step: Only that of this step; ``None``: of any.
        problem: Returns what is wrong with the files of one, as :func:`problem_with` does.

    Returns:
        The checkpoint, ``None`` where there is none; and what is wrong with each that was passed over.
    """
    problems: list[str] = []
    for path, found in opened:
        if isinstance(found, DamagedCheckpoint):
            problems.append(str(found))
        elif step in (None, found.step):
            told = problem(path, found.layers)
            if told is None:
                return (path, found), problems
            problems.append(told)
    return None, problems

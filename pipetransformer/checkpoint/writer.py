"""Writes checkpoints behind the training: each rank its own layers, rank 0 the manifest, one at a time.

No collective runs here, so that a thread can do it while the rank trains. Ranks meet in the staging folder::

    rank 0   layer files, rank-0.json, waits for rank-1.json ... , manifest.json, rename, prune
    rank 1   layer files, rank-1.json
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from pipetransformer.checkpoint.folder import CheckpointFolder, Retention, write_flushed
from pipetransformer.checkpoint.manifest import MANIFEST, LayerFile, Manifest, digest_of, layer_file

POLL_S = 0.02  # between two looks for the other ranks' files
LayerTensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Written:
    """The end of a checkpoint's writing on rank 0.

    Attributes:
        path: The published checkpoint; ``None`` after a failure.
        num_bytes: Of all layer files.
        seconds: From the snapshot to the publication.
        error: Why there is none; empty after a success.
    """

    step: int
    path: Path | None
    num_bytes: int
    seconds: float
    error: str = ""


class NotWritten(Exception):
    """A checkpoint cannot be published."""


class CheckpointWriter:
    """One rank's writer.

    Args:
        folder: The checkpoints of the run; every rank sees the same.
        retention: What stays when a new one is published.
        rank: Of this process.
        world_size: Ranks that write.
        timeout_s: Longest wait for the other ranks' files.
    """

    def __init__(
        self, folder: CheckpointFolder, retention: Retention, rank: int, world_size: int, timeout_s: float
    ) -> None:  # fmt: skip
        self.folder, self._retention = folder, retention
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._thread: Thread | None = None
        self._outcome: Written | None = None
        self._given_up = Event()

    @property
    def in_flight(self) -> bool:
        """True while a checkpoint is being written, as far as this rank has a part in it."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, layers: Mapping[int, tuple[str, LayerTensors]], manifest: Manifest) -> None:
        """Begins to write a checkpoint.

        Args:
            layers: Prefix and tensors of each layer that this rank writes, in host memory that nobody changes.
            manifest: Without layer files; used by rank 0.
        """
        self.wait()
        self._thread = Thread(target=self._run, args=(layers, manifest), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the checkpoint in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_outcome(self) -> Written | None:
        """Returns on rank 0 how the last checkpoint ended, once."""
        if self.in_flight:
            return None
        outcome, self._outcome = self._outcome, None
        return outcome

    def close(self, give_up: bool) -> None:
        """Ends the writer.

        Args:
            give_up: Do not wait for other ranks' files: this run has failed.
        """
        if give_up:
            self._given_up.set()
        self.wait()

    def _run(self, layers: Mapping[int, tuple[str, LayerTensors]], manifest: Manifest) -> None:
        start, staging = time.perf_counter(), self.folder.staging(manifest.step)
        path, num_bytes, problem = None, 0, ""
        try:
            self._write_own(staging, layers)
            if self._rank == 0:
                files = self._gather(staging)
                path, num_bytes = self._publish(staging, manifest, files), sum(file.num_bytes for file in files)
        except (OSError, SafetensorError, NotWritten) as error:
            problem = f"{error}"
            self._clean_up(staging, layers, problem)
        if self._rank == 0:
            self._outcome = Written(manifest.step, path, num_bytes, time.perf_counter() - start, problem)

    def _write_own(self, staging: Path, layers: Mapping[int, tuple[str, LayerTensors]]) -> None:
        staging.mkdir(parents=True, exist_ok=True)
        files = []
        for layer, (prefix, tensors) in layers.items():
            content = save(dict(tensors))
            write_flushed(staging / layer_file(layer), content)
            files.append(LayerFile(layer, prefix, len(content), digest_of(content)))
        self._tell(staging, {"files": [asdict(file) for file in files]})

    def _tell(self, staging: Path, message: dict[str, Any]) -> None:
        """Writes this rank's message to rank 0; it is whole when it is there."""
        unfinished = staging / f"rank-{self._rank}.part"
        write_flushed(unfinished, json.dumps(message).encode())
        unfinished.rename(staging / f"rank-{self._rank}.json")

    def _gather(self, staging: Path) -> list[LayerFile]:
        """Waits for all ranks' messages and removes them.

        Raises:
            NotWritten: A rank could not write, is late, or the run has given up.
        """
        files: list[LayerFile] = []
        deadline = time.monotonic() + self._timeout_s
        for rank in range(self._world_size):
            path = staging / f"rank-{rank}.json"
            while not path.is_file():
                if self._given_up.wait(POLL_S):
                    raise NotWritten("the run ended before it was written")
                if time.monotonic() > deadline:
                    raise NotWritten(
                        f"rank {rank} did not write its layers to {staging} within {self._timeout_s:g} s; all nodes "
                        "need the same run folder"
                    )
            message = json.loads(path.read_bytes())
            if "error" in message:
                raise NotWritten(f"rank {rank}: {message['error']}")
            files += [LayerFile(**file) for file in message["files"]]
            path.unlink()
        return sorted(files, key=lambda file: file.layer)

    def _publish(self, staging: Path, manifest: Manifest, files: list[LayerFile]) -> Path:
        write_flushed(staging / MANIFEST, replace(manifest, layers=tuple(files)).to_json())
        path = self.folder.publish(manifest.step)
        self.folder.prune(self._retention)
        return path

    def _clean_up(self, staging: Path, layers: Iterable[int], problem: str) -> None:
        """Makes room after a failure; a rank other than 0 then tells rank 0."""
        if self._rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
            return
        for layer in layers:
            with suppress(OSError):
                (staging / layer_file(layer)).unlink()
        with suppress(OSError):
            self._tell(staging, {"error": problem})

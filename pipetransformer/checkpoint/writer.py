"""Writes checkpoints behind the training: each rank its own layers, rank 0 the manifest, one at a time.

No collective runs here, so that a thread can do it while the rank trains. Ranks meet in the store of the run::

    rank 0   layer files, waits for the messages of rank 1 ... , manifest.json, rename, prune, a message: it is over
    rank 1   layer files, a message: files and digests, or why there are none
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor
from torch.distributed import DistError, Store

from pipetransformer.checkpoint.folder import CheckpointFolder, Retention, write_flushed
from pipetransformer.checkpoint.manifest import MANIFEST, LayerFile, Manifest, digest_of, layer_file

POLL_S = 0.02  # between two looks for the other ranks' messages
OVER = "over"
LayerTensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Written:
    """The end of a checkpoint's writing on rank 0.

    Attributes:
        path: The published checkpoint; ``None`` after a failure.
        num_bytes: Of all layer files.
        seconds: From the snapshot to the publication.
        error: Why there is none, or why earlier ones are there that need not stay; empty after a success.
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
        rank: Of this process.
        world_size: Ranks that write.
        timeout_s: Longest wait for the other ranks' files.
        store: Joins the ranks of the run; used by no other thread.
    """

    def __init__(
        self, folder: CheckpointFolder, rank: int, world_size: int, timeout_s: float, store: Store
    ) -> None:  # fmt: skip
        self.folder, self._retention, self._rank = folder, Retention(), rank
        self._messages, self._num_started = _Messages(store, rank, world_size, timeout_s), 0
        self._thread: Thread | None = None
        self._staged: dict[int, Path] = {}  # by this rank, other than rank 0, by the number of the checkpoint
        self._outcome: Written | None = None

    @property
    def in_flight(self) -> bool:
        """True while a checkpoint is being written, as far as this rank has a part in it."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, layers: Mapping[int, tuple[str, LayerTensors]], manifest: Manifest, retention: Retention) -> None:
        """Begins to write a checkpoint.

        Args:
            layers: Prefix and tensors of each layer that this rank writes, in host memory that nobody changes.
            manifest: Without layer files; used by rank 0.
            retention: What stays when it is published; used by rank 0.
        """
        self.wait()
        self._retention = retention
        self._num_started += 1
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
            self._messages.given_up.set()
        self.wait()
        self._remove_staged()

    def _remove_staged(self) -> None:
        """Removes what this rank wrote for checkpoints that are over: on a disk of its own nobody else does."""
        over = self._messages.last_over() if self._staged else 0
        for number in [number for number in self._staged if number <= over]:
            shutil.rmtree(self._staged.pop(number), ignore_errors=True)

    def _run(self, layers: Mapping[int, tuple[str, LayerTensors]], manifest: Manifest) -> None:
        staging = self.folder.staging(manifest.step, self._num_started)
        if self._rank == 0:
            self._outcome = self._write_all(staging, layers, manifest)
            self._messages.tell_over(self._num_started)
            return
        self._remove_staged()
        self._staged[self._num_started] = staging
        try:
            message = {"files": [asdict(file) for file in _write_layers(staging, layers)]}
        except (OSError, SafetensorError) as error:
            message = {"error": str(error)}
        self._messages.send(self._num_started, message)

    def _write_all(self, staging: Path, layers: Mapping[int, tuple[str, LayerTensors]], manifest: Manifest) -> Written:
        """Writes rank 0's layers, waits for the other ranks' and publishes; leaves nothing behind after a failure."""
        start, own, problem = time.perf_counter(), list[LayerFile](), ""
        try:
            own = _write_layers(staging, layers)
        except (OSError, SafetensorError) as error:
            problem = str(error)
        try:  # after a failure too: a rank that still writes would make the folder again
            files = sorted([*own, *self._messages.receive(self._num_started, staging)], key=lambda file: file.layer)
            if problem:
                raise NotWritten(problem)
            path = self._publish(staging, manifest, files)
        except (OSError, DistError, NotWritten) as error:
            shutil.rmtree(staging, ignore_errors=True)
            return Written(manifest.step, None, 0, time.perf_counter() - start, problem or str(error))
        try:
            self.folder.prune(self._retention, manifest.step)
        except OSError as error:
            problem = str(error)
        num_bytes = sum(file.num_bytes for file in files)
        return Written(manifest.step, path, num_bytes, time.perf_counter() - start, problem)

    def _publish(self, staging: Path, manifest: Manifest, files: list[LayerFile]) -> Path:
        for path in (staging / layer_file(file.layer) for file in files):
            if not path.is_file():
                raise NotWritten(
                    f"{path} is gone, or on the disk of another node that wrote it: all need one run folder"
                )
        write_flushed(staging / MANIFEST, replace(manifest, layers=tuple(files)).to_json())
        return self.folder.publish(staging, manifest.step)


def _write_layers(staging: Path, layers: Mapping[int, tuple[str, LayerTensors]]) -> list[LayerFile]:
    staging.mkdir(parents=True, exist_ok=True)
    files = []
    for layer, (prefix, tensors) in layers.items():
        try:
            content = save(dict(tensors))
        except MemoryError:
            raise OSError(f"no memory of the host is left for the file of layer {layer}") from None
        write_flushed(staging / layer_file(layer), content)
        files.append(LayerFile(layer, prefix, len(content), digest_of(content)))
    return files


class _Messages:
    """The last word of each rank on a checkpoint, after which it writes nothing more, in the store of the run.

    A store has room for them where the disk has none.

    Args:
        store: Joins the ranks; used by no other thread.
        world_size: Ranks, of which rank 0 receives.
        rank: Of this process.
        timeout_s: Longest wait for all of them together.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        self.given_up = Event()

    def send(self, number: int, message: dict[str, Any]) -> None:
        """Tells rank 0 how writing the checkpoint with this number has ended here."""
        with suppress(DistError):  # rank 0 has ended, and with it the run
            self._store.set(f"{number}/{self._rank}", json.dumps(message))

    def tell_over(self, number: int) -> None:
        """Tells the other ranks that the checkpoint with this number was published or given up."""
        with suppress(DistError):
            self._store.set(OVER, str(number))

    def last_over(self) -> int:
        """Returns the number of the last checkpoint of which rank 0 has told that; 0 before the first."""
        with suppress(DistError):
            return int(self._store.get(OVER)) if self._store.check([OVER]) else 0
        return 0

    def receive(self, number: int, staging: Path) -> list[LayerFile]:
        """Waits for all ranks and returns the files that they have written.

        Raises:
            NotWritten: A rank could not write, is late, or the run has given up.
        """
        deadline, files, problems = time.monotonic() + self._timeout_s, list[LayerFile](), list[str]()
        for rank in range(1, self._world_size):
            key = f"{number}/{rank}"
            while not self._store.check([key]):
                if self.given_up.wait(POLL_S):
                    raise NotWritten("the run ended before it was written")
                if time.monotonic() > deadline:
                    raise NotWritten(f"rank {rank} did not write its layers to {staging} within {self._timeout_s:g} s")
            message = json.loads(self._store.get(key))
            self._store.delete_key(key)
            if "error" in message:
                problems.append(f"rank {rank}: {message['error']}")
            files += [LayerFile(**file) for file in message.get("files", [])]
        if problems:
            raise NotWritten("; ".join(problems))
        return files

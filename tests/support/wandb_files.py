"""The record of an offline run of Weights & Biases, read back by wandb's own messages.

wandb writes a log in LevelDB's format, whose entries are serialized messages::

    7 bytes       :W&B, a magic number and a version
    blocks of     entries: 4 bytes of checksum, 2 of length, 1 that says whether it is whole (1), the first part (2),
    32 KiB        a middle one (3) or the last (4), and the part itself; zeros where no further header fits
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

FILE_HEADER, HEADER, BLOCK = 7, struct.Struct("<IHB"), 2**15
WHOLE, LAST = 1, 4


@dataclass
class OfflineRun:
    """An offline run as it would be shown after ``wandb sync``.

    Attributes:
        about: Its name, group, job type and identity.
        history: The rows that were logged, in their order, by the names of charts; of a table its file and size.
        summary: The last value of each chart, and what the run wrote there itself.
    """

    folder: Path
    about: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def tables(self, name: str) -> list[list[dict[str, Any]]]:
        """The rows of each state in which a table was logged."""
        return [[*self._rows(row[f"{name}/path"])] for row in self.history if f"{name}/path" in row]

    def _rows(self, path: str) -> Iterator[dict[str, Any]]:
        table = json.loads((self.folder / "files" / path).read_text())
        return (dict(zip(table["columns"], row, strict=True)) for row in table["data"])


def read_offline_runs(run_dir: Path) -> list[OfflineRun]:
    """Reads the offline runs of a run folder by time: one for each start of the run."""
    return [_read(folder) for folder in sorted(run_dir.glob("wandb/offline-run-*"))]


def _read(folder: Path) -> OfflineRun:
    (file,) = folder.glob("run-*.wandb")
    run = OfflineRun(folder)
    for entry in _entries(file.read_bytes()):
        record = Record.FromString(entry)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.about = {"name": record.run.display_name, "group": record.run.run_group, "id": record.run.run_id}
            run.about["job_type"] = record.run.job_type
        elif kind == "history":
            run.history.append(_values(record.history.item))
        elif kind == "summary":
            run.summary |= _values(record.summary.update)
    return run


def _values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _entries(content: bytes) -> Iterator[bytes]:
    at, entry = FILE_HEADER, b""
    while at + HEADER.size <= len(content):
        if (left := BLOCK - at % BLOCK) < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(content, at)
        entry += content[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        if kind in (WHOLE, LAST):
            yield entry
            entry = b""

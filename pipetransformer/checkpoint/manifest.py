"""The manifest of a checkpoint: everything but the tensors, in one JSON file with a digest of itself.

A checkpoint is a folder::

    checkpoints/step-00000120/
        layer-000.safetensors    weights and optimizer state of a layer, under their original names
        layer-001.safetensors
        manifest.json            state of the run, and size and digest of every other file; written last
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from pipetransformer.errors import DamagedCheckpoint

MANIFEST = "manifest.json"
SCHEMA = 1
LARGEST = 2**30  # bytes of a manifest; a file that is larger is none
_LAYER_FILE = re.compile(r"layer-\d{3,6}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def digest_of(data: bytes | memoryview) -> str:
    """Returns 128 bits of BLAKE2b in hexadecimal digits."""
    return blake2b(data, digest_size=16).hexdigest()


def layer_file(layer: int) -> str:
    """Returns the name of a layer's file."""
    return f"layer-{layer:03d}.safetensors"


@dataclass(frozen=True)
class LayerFile:
    """One written file of a checkpoint.

    Attributes:
        layer: Index of the layer over the whole model.
        prefix: Path of its module in the original model; may be empty.
        num_bytes: Size of the file.
        digest: Of the file, by :func:`digest_of`.
    """

    layer: int
    prefix: str
    num_bytes: int
    digest: str

    @property
    def name(self) -> str:
        """Name of the file. It follows from the layer, so that no manifest can name a file elsewhere."""
        return layer_file(self.layer)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its tensors.

    Attributes:
        step: Optimizer steps done.
        layers: A file for each layer, in their order.
        train: State of the run, from :meth:`~pipetransformer.planning.state.TrainState.state_dict`.
        settings: Options of the run by their dotted names.
        overrides: Arguments of the command line; ``None`` for a run that was started from Python.
        data: Digest of the training samples in their order, and their number.
        cache: Identity of the stored features; empty without a cache.
        versions: Versions of the libraries.
        logger: What the tracking service needs to go on with its run.
        log_bytes: Length of the event log at this step.
        sample_ids: Digest of the sample ids of the next global batch; empty at the end of the run.
        metric: The main metric, if the model was evaluated at this step; higher is better.
        seconds: Time of the run so far, without what comes before the first plan of each start; for the reader alone.
        spent: Other counts of the summary so far, from :meth:`~pipetransformer.training.spent.Spent.state_dict`.
    """

    step: int
    layers: tuple[LayerFile, ...]
    train: dict[str, Any]
    settings: dict[str, Any]
    overrides: list[str] | None
    data: dict[str, Any]
    cache: dict[str, Any]
    versions: dict[str, str]
    logger: dict[str, Any]
    log_bytes: int
    sample_ids: str
    metric: float | None
    seconds: float
    spent: dict[str, Any] = field(default_factory=dict)

    def fits(self, num_samples: int, batch_size: int) -> bool:
        """Returns whether the step has the same place in its epoch with batches of this size from so many samples."""
        steps_per_epoch = -(-num_samples // batch_size)
        place = self.train.get("epoch"), self.train.get("step_in_epoch")
        return place == divmod(self.train.get("step", 0), steps_per_epoch)

    def to_json(self) -> bytes:
        """Returns the file's content. Floats keep every bit; NaN and infinities are written as Python's JSON does."""
        values = {"schema": SCHEMA} | asdict(self)
        return json.dumps(values | {"digest": _own_digest(values)}, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes, path: Path) -> Self:
        """Reads a file's content.

        Raises:
            DamagedCheckpoint: It is not what :meth:`to_json` wrote, or of another schema.
        """
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} is no JSON ({str(error)[:80]})") from None
        if not isinstance(values, dict) or values.pop("digest", None) != _own_digest(values):
            raise DamagedCheckpoint(f"{path} is damaged: its digest does not fit")
        if values.pop("schema", None) != SCHEMA:
            raise DamagedCheckpoint(f"{path} has another schema than {SCHEMA}, which this release reads")
        try:
            layers = tuple(_layer(each) for each in values.pop("layers"))
            manifest = cls(layers=layers, **values)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise DamagedCheckpoint(f"{path} lacks what a checkpoint has ({error})") from None
        if not (isinstance(manifest.step, int) and isinstance(manifest.train, dict) and manifest.log_bytes >= 0):
            raise DamagedCheckpoint(f"{path} has values of other types than a checkpoint has")
        if [each.layer for each in manifest.layers] != list(range(len(manifest.layers))) or not manifest.layers:
            raise DamagedCheckpoint(f"{path} does not name every layer once")
        return manifest


def _own_digest(values: Mapping[str, Any]) -> str:
    return digest_of(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def _layer(values: dict[str, Any]) -> LayerFile:
    """Checks an entry of the manifest, of which the digest alone says that this package wrote it."""
    file = LayerFile(**{each.name: values[each.name] for each in fields(LayerFile)})
    if not (isinstance(file.layer, int) and isinstance(file.num_bytes, int) and isinstance(file.prefix, str)):
        raise TypeError("a layer's entry has values of other types")
    if not _DIGEST.fullmatch(file.digest) or not _LAYER_FILE.fullmatch(file.name):
        raise TypeError(f"layer {file.layer} has no digest")
    return file


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
        DamagedCheckpoint: It is missing, unreadable or damaged.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > LARGEST:
            raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, which no manifest has")
        return Manifest.from_json(path.read_bytes(), path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from None

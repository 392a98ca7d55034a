"""Time of reading a batch from each tier and in each storage type, in one process with one thread."""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from pipetransformer.autocache.capacity import SEED, SHARD_SIZE
from pipetransformer.autocache.codec import codec
from pipetransformer.autocache.layout import Budgets, assign_tiers, bytes_needed
from pipetransformer.autocache.store import FeatureStore, StoreSpec

STORAGE = ("exact", "bfloat16", "float16", "int8")
HEADER = ("features", "tier", "storage", "KiB per sample", "read, ms", "MB/s")
KEY = 1


@dataclass(frozen=True)
class FeatureShape:
    """Shape of a sample's features, float32."""

    name: str
    num_tokens: int
    hidden_size: int


SHAPES = (FeatureShape("MiniLM", 64, 384), FeatureShape("ViT-B/16", 197, 768))


@dataclass(frozen=True)
class ReadTimes:
    """Seconds of reading a batch, one for each round.

    Attributes:
        sample_bytes: Of a sample, as it is stored.
        batch_bytes: Of the batch, as it is stored.
    """

    shape: str
    tier: str
    storage: str
    sample_bytes: int
    batch_bytes: int
    seconds: tuple[float, ...]

    def row(self) -> tuple[str, ...]:
        seconds = median(self.seconds)
        return (
            self.shape,
            self.tier,
            self.storage,
            f"{self.sample_bytes / 1024:.0f}",
            f"{1000 * seconds:.1f}",
            f"{self.batch_bytes / seconds / 1e6:,.0f}",
        )


class FilledStore:
    """A store that is read from one of its tiers; nine of ten samples are on disk, or none.

    Args:
        num_samples: In the tier that is read.
    """

    def __init__(self, shape: FeatureShape, storage: str, tier: str, num_samples: int, folder: Path) -> None:
        self.shape, self.storage, self.tier = shape, storage, tier
        self.row_bytes = codec(storage, shape.hidden_size, torch.float32).row_bytes
        own = self._bytes_of(num_samples)
        budgets = Budgets(own, 0) if tier == "memory" else Budgets(own // 9, own)
        lengths = np.full(num_samples if tier == "memory" else num_samples * 10 // 9, shape.num_tokens)
        layout = assign_tiers(lengths, self.row_bytes, budgets, SHARD_SIZE, SEED, persistent=False)
        self._ids = layout.tiers[tier].ids
        self._store = FeatureStore.create(
            StoreSpec(
                lengths, shape.hidden_size, torch.float32, storage, budgets, folder / "features", SHARD_SIZE, SEED
            )
        )  # fmt: skip
        features = torch.randn(SHARD_SIZE, shape.num_tokens, shape.hidden_size)
        for number, ids in enumerate(self._store.shards):
            self._store.write(number, ids, features[: len(ids)], KEY)

    def _bytes_of(self, num_samples: int) -> int:
        return bytes_needed(np.full(num_samples, self.shape.num_tokens), self.row_bytes, SHARD_SIZE)

    def seconds(self, generator: np.random.Generator, out: torch.Tensor) -> float:
        """Reads a random batch; on disk after the file was evicted from the page cache."""
        ids = generator.choice(self._ids, len(out), replace=False)
        if self.tier == "disk":
            self._store.drop_page_cache()
        start = time.perf_counter()
        _, found = self._store.read(ids, self.shape.num_tokens, KEY, out)
        seconds = time.perf_counter() - start
        assert bool(found.all())
        return seconds

    def close(self) -> None:
        self._store.close()


def measure_reading(shapes: tuple[FeatureShape, ...], batch_size: int, num_rounds: int) -> list[ReadTimes]:
    """Times one batch from each store in every round."""
    return [times for shape in shapes for times in _measure(shape, batch_size, num_rounds)]


def _measure(shape: FeatureShape, batch_size: int, num_rounds: int) -> list[ReadTimes]:
    generator = np.random.default_rng(SEED)
    out = torch.zeros(batch_size, shape.num_tokens, shape.hidden_size)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        stores = [
            FilledStore(shape, storage, tier, 4 * batch_size, Path(folder))
            for tier in ("memory", "disk")
            for storage in STORAGE
        ]
        for store in stores:
            closing.callback(store.close)
            store.seconds(generator, out)
        rounds = [[store.seconds(generator, out) for store in stores] for _ in range(num_rounds)]
    return [
        _times(store, batch_size, seconds) for store, seconds in zip(stores, zip(*rounds, strict=True), strict=True)
    ]


def _times(store: FilledStore, batch_size: int, seconds: tuple[float, ...]) -> ReadTimes:
    sample_bytes = store.shape.num_tokens * store.row_bytes
    return ReadTimes(store.shape.name, store.tier, store.storage, sample_bytes, batch_size * sample_bytes, seconds)

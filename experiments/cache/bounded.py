"""Memory growth of a process that stores and reads more than its memory budget holds."""

import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipetransformer.autocache.layout import Budgets
from pipetransformer.autocache.store import FeatureStore, StoreSpec

HEADER = (
    "budget of memory, MiB",
    "store, MiB",
    "batch, MiB",
    "memory tier",
    "of the file",
    "buffers",
    "in all",
    "budget + 10 %",
)
KEY, SEED, SHARD_SIZE, NUM_TOKENS, HIDDEN_SIZE = 1, 0, 32, 64, 384
MIB = 2**20
SAMPLE_BYTES = NUM_TOKENS * HIDDEN_SIZE * 4
KINDS = {"RssShmem": "memory_tier", "RssFile": "file", "RssAnon": "buffers", "VmRSS": "total"}


@dataclass(frozen=True)
class Growth:
    """Bytes by which the process's memory grew, each at its peak.

    Attributes:
        memory_tier: Shared memory that it has touched.
        file: Mapped pages of the disk tier's file.
        buffers: All else that it took: of the batches above all.
        total: Of the three together.
    """

    budget: int
    store: int
    batch: int
    memory_tier: int
    file: int
    buffers: int
    total: int

    @property
    def of_the_cache(self) -> int:
        return self.memory_tier + self.file

    def row(self) -> tuple[str, ...]:
        figures = (
            self.budget, self.store, self.batch, self.memory_tier, self.file, self.buffers, self.total,
            self.budget * 11 // 10,
        )  # fmt: skip
        return tuple(f"{figure / MIB:.1f}" for figure in figures)


class Watch:
    """Samples the memory of this process in a thread."""

    def __init__(self) -> None:
        self._start = _resident()
        self._most = dict(self._start)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.look()

    def look(self) -> None:
        for kind, num_bytes in _resident().items():
            self._most[kind] = max(self._most[kind], num_bytes)

    def end(self) -> dict[str, int]:
        """Ends the sampling and returns the peak growth by kind."""
        self._done.set()
        self._thread.join()
        self.look()
        return {kind: most - self._start[kind] for kind, most in self._most.items()}


def _resident() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: line for line in lines}
    return {own: int(values[name].split()[1]) * 1024 for name, own in KINDS.items()}


def measure_bounded(budgets_mib: tuple[int, ...], batch_size: int, num_batches: int) -> list[Growth]:
    """Stores eleven times each budget, one part in memory and ten on disk, and reads it in random order."""
    return [_measure(budget_mib, batch_size, num_batches) for budget_mib in budgets_mib]


def _measure(budget_mib: int, batch_size: int, num_batches: int) -> Growth:
    with tempfile.TemporaryDirectory() as folder:
        _use(Path(folder), MIB, batch_size=4, num_batches=2)  # what is loaded once is not the cache's
        watch = Watch()
        num_samples = _use(Path(folder), budget_mib * MIB, batch_size, num_batches)
        growth = watch.end()
    return Growth(budget_mib * MIB, num_samples * SAMPLE_BYTES, batch_size * SAMPLE_BYTES, **growth)


def _use(folder: Path, budget: int, batch_size: int, num_batches: int) -> int:
    num_samples = 11 * budget // SAMPLE_BYTES - 2 * SHARD_SIZE
    spec = StoreSpec(
        np.full(num_samples, NUM_TOKENS), HIDDEN_SIZE, torch.float32, "exact", Budgets(budget, 10 * budget),
        folder / "features", SHARD_SIZE, SEED,
    )  # fmt: skip
    store = FeatureStore.create(spec)
    features, out = (torch.randn(size, NUM_TOKENS, HIDDEN_SIZE) for size in (SHARD_SIZE, batch_size))
    for shard, ids in enumerate(store.shards):
        store.write(shard, ids, features[: len(ids)], KEY)
    generator = np.random.default_rng(SEED)
    for _ in range(num_batches):
        _, found = store.read(generator.choice(num_samples, batch_size, replace=False), NUM_TOKENS, KEY, out)
        assert bool(found.all())
    store.close()
    return num_samples

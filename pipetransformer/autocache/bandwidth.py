"""How fast this machine reads features, from each tier."""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from pipetransformer.autocache.description import Description
from pipetransformer.autocache.layout import Budgets, bytes_needed
from pipetransformer.autocache.room import SEED, SHARD_SIZE, Kind
from pipetransformer.autocache.samples import SampleStore

NUM_BYTES, NUM_BATCHES, KEY = 16 << 20, 4, 1


def seconds_per_byte(kind: Kind, num_tokens: int, tiers: Iterable[str], folder: Path) -> dict[str, float]:
    """Seconds per byte of a feature as it leaves the cache, reading batches of samples in random order.

    The disk's file is read after the system has let go of it, as a store larger than the memory would be.

    Args:
        num_tokens: Of a sample.
        tiers: ``memory``, ``disk``.
        folder: The caller's own, on the disk. The file that is written there goes again; what a killed run has left
            of it is replaced.
    """
    sample_bytes = num_tokens * kind.hidden_size * kind.dtype.itemsize
    num_samples = NUM_BATCHES * max(1, NUM_BYTES // sample_bytes // NUM_BATCHES)
    return {tier: _measure(kind, np.full(num_samples, num_tokens), tier, folder) for tier in tiers}


def _measure(kind: Kind, lengths: np.ndarray, tier: str, folder: Path) -> float:
    store = _store(kind, lengths, tier, folder)
    try:
        for shard, ids in enumerate(store.shards):
            store.write(shard, ids, torch.randn(len(ids), int(lengths[0]), kind.hidden_size).to(kind.dtype), KEY)
        if tier == "disk":
            store.release_pages()
            forget(store.description.path)
        batches = np.array_split(np.random.default_rng(SEED).permutation(len(lengths)), NUM_BATCHES)
        out = torch.zeros(len(batches[0]), int(lengths[0]), kind.hidden_size, dtype=kind.dtype)
        seconds = [_seconds(store, ids, out) for ids in batches]
        return median(seconds) / (out.numel() * out.element_size())
    finally:
        store.close()


def _store(kind: Kind, lengths: np.ndarray, tier: str, folder: Path) -> SampleStore:
    row_bytes = kind.codec().row_bytes
    room = bytes_needed(lengths, row_bytes, SHARD_SIZE)
    budgets = Budgets(room, 0) if tier == "memory" else Budgets(0, room)
    path = folder / "bandwidth.features"
    return SampleStore.create(
        Description(lengths, kind.hidden_size, kind.dtype, kind.storage, budgets, path, SHARD_SIZE, SEED)
    )


def _seconds(store: SampleStore, ids: np.ndarray, out: torch.Tensor) -> float:
    start = time.perf_counter()
    store.read(ids, out.shape[1], KEY, out)
    return time.perf_counter() - start


def forget(path: Path) -> None:
    """Has the system write a file and drop it from its memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)

"""How fast this machine reads features, from each tier."""

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np
import torch

from pipetransformer.autocache.capacity import SEED, SHARD_SIZE, FeatureFormat
from pipetransformer.autocache.layout import Budgets, bytes_needed
from pipetransformer.autocache.store import FeatureStore
from pipetransformer.autocache.store_spec import StoreSpec

NUM_BYTES, NUM_BATCHES, KEY = 16 << 20, 4, 1


def seconds_per_byte(kind: FeatureFormat, num_tokens: int, tiers: Mapping[str, int], folder: Path) -> dict[str, float]:
    """Seconds per byte of a feature as it leaves the cache, reading batches of samples in random order.

    The disk's file is read after the system has let go of it, as a store larger than the memory would be.

    Args:
        num_tokens: Of a sample.
        tiers: Bytes of ``memory`` and ``disk`` that may be used.
        folder: On the disk.
    """
    return {tier: _measure(kind, _lengths(kind, num_tokens, own), tier, folder) for tier, own in tiers.items()}


def _lengths(kind: FeatureFormat, num_tokens: int, num_bytes: int) -> np.ndarray:
    """Of as many samples as are measured, or find room."""
    row_bytes = kind.codec().row_bytes
    num_samples = max(1, NUM_BYTES // (num_tokens * row_bytes))
    while num_samples > 1 and bytes_needed(np.full(num_samples, num_tokens), row_bytes, SHARD_SIZE) > num_bytes:
        num_samples //= 2
    return np.full(num_samples, num_tokens)


def _measure(kind: FeatureFormat, lengths: np.ndarray, tier: str, folder: Path) -> float:
    store = _store(kind, lengths, tier, folder)
    try:
        for shard, ids in enumerate(store.shards):
            store.write(shard, ids, torch.randn(len(ids), int(lengths[0]), kind.hidden_size).to(kind.dtype), KEY)
        if tier == "disk":
            store.forget()
        order = np.random.default_rng(SEED).permutation(len(lengths))
        batches = np.array_split(order, min(NUM_BATCHES, len(order)))
        out = torch.zeros(len(batches[0]), int(lengths[0]), kind.hidden_size, dtype=kind.dtype)
        return median(_seconds(store, ids, out[: len(ids)]) / out[: len(ids)].nbytes for ids in batches)
    finally:
        store.close()


def _store(kind: FeatureFormat, lengths: np.ndarray, tier: str, folder: Path) -> FeatureStore:
    row_bytes = kind.codec().row_bytes
    capacity = bytes_needed(lengths, row_bytes, SHARD_SIZE)
    budgets = Budgets(capacity, 0) if tier == "memory" else Budgets(0, capacity)
    path = folder / "bandwidth"
    description = StoreSpec(lengths, kind.hidden_size, kind.dtype, kind.storage, budgets, path, SHARD_SIZE, SEED)
    return FeatureStore.create(description, reserve_bytes=0)  # a store that is there may have left little


def _seconds(store: FeatureStore, ids: np.ndarray, out: torch.Tensor) -> float:
    start = time.perf_counter()
    store.read(ids, out.shape[1], KEY, out)
    return time.perf_counter() - start

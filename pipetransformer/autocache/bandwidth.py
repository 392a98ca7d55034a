"""Read bandwidth of each tier on this machine, and the level from which on reading is cheaper than computing."""

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np
import torch

from pipetransformer.autocache.capacity import SEED, SHARD_SIZE, FeatureFormat
from pipetransformer.autocache.layout import Budgets, bytes_needed
from pipetransformer.autocache.store import FeatureStore, StoreSpec
from pipetransformer.autopipe.limit import fill_seconds
from pipetransformer.autopipe.profile import AffineTime, Profile

NUM_BYTES, NUM_BATCHES, KEY = 16 << 20, 4, 1
LEAST_RATIO = 4  # half of it at least lies between the sizes of two batches


def read_times(
    feature_format: FeatureFormat, num_tokens: int, tiers: Mapping[str, int], folder: Path, share: int
) -> dict[str, AffineTime]:
    """Measures how long features take to leave the cache, for batches in random order.

    The disk tier is evicted from the page cache first, as a store larger than the memory would be.

    Args:
        feature_format: Of the features.
        num_tokens: Tokens of a sample.
        tiers: Bytes of ``memory`` and ``disk`` that may be used.
        folder: A folder on the disk.
        share: Samples of a device's batch, which may be few.

    Returns:
        The seconds of a batch as a line in its bytes, by tier.
    """
    return {
        tier: _measure(feature_format, _lengths(feature_format, num_tokens, most), tier, folder, share)
        for tier, most in tiers.items()
    }


def _lengths(feature_format: FeatureFormat, num_tokens: int, most_bytes: int) -> np.ndarray:
    """Returns the lengths of the samples to measure: NUM_BYTES of them, or as many as fit."""
    row_bytes = feature_format.codec().row_bytes
    num_samples = max(1, NUM_BYTES // (num_tokens * row_bytes))
    while num_samples > 1 and bytes_needed(np.full(num_samples, num_tokens), row_bytes, SHARD_SIZE) > most_bytes:
        num_samples //= 2
    return np.full(num_samples, num_tokens)


def _measure(feature_format: FeatureFormat, lengths: np.ndarray, tier: str, folder: Path, share: int) -> AffineTime:
    hidden_size, dtype = feature_format.hidden_size, feature_format.dtype
    store = _store(feature_format, lengths, tier, folder)
    try:
        for shard, ids in enumerate(store.shards):
            store.write(shard, ids, torch.randn(len(ids), int(lengths[0]), hidden_size).to(dtype), KEY)
        if tier == "disk":
            store.drop_page_cache()
        order = np.random.default_rng(SEED).permutation(len(lengths))
        # of larger batches the bytes are all, and two sizes near each other make no line
        few = share if LEAST_RATIO * share <= len(order) // (2 * NUM_BATCHES) else 0
        small, large = order[: few * NUM_BATCHES].reshape(-1, max(few, 1)), order[few * NUM_BATCHES :]
        batches = np.array_split(large, min(NUM_BATCHES, len(large)))
        out = torch.zeros(len(batches[0]), int(lengths[0]), hidden_size, dtype=dtype)
        small_s = [_seconds(store, ids, out[:few]) for ids in small]
        byte_s = median(_seconds(store, ids, out[: len(ids)]) / out[: len(ids)].nbytes for ids in batches)
        if not small_s:
            return AffineTime(0.0, byte_s)
        return AffineTime.through((out[:few].nbytes, out.nbytes), (median(small_s), byte_s * out.nbytes))
    finally:
        store.close()


def _store(feature_format: FeatureFormat, lengths: np.ndarray, tier: str, folder: Path) -> FeatureStore:
    num_bytes = bytes_needed(lengths, feature_format.codec().row_bytes, SHARD_SIZE)
    spec = StoreSpec(
        lengths=lengths,
        hidden_size=feature_format.hidden_size,
        dtype=feature_format.dtype,
        storage=feature_format.storage,
        budgets=Budgets(num_bytes, 0) if tier == "memory" else Budgets(0, num_bytes),
        path=folder / "bandwidth",
        shard_size=SHARD_SIZE,
        seed=SEED,
    )
    return FeatureStore.create(spec, reserve_bytes=0)  # an existing store may have left little


def _seconds(store: FeatureStore, ids: np.ndarray, out: torch.Tensor) -> float:
    start = time.perf_counter()
    store.read(ids, out.shape[1], KEY, out)
    return time.perf_counter() - start


def read_seconds(profile: Profile, level: int) -> float:
    """Returns the seconds per sample to read the output of block ``level``."""
    return profile.cache_read_s_per_byte * profile.layers[level].output_bytes


def forward_seconds(profile: Profile, level: int) -> float:
    """Returns the seconds per sample to compute the output of block ``level``, without launch overhead."""
    return fill_seconds(profile, 0, level, 1)


def passes_to_pay_back(profile: Profile, from_level: int, to_level: int, missing: float = 1.0) -> float | None:
    """Returns the passes over the samples after which a fill has saved as much time as it took.

    Args:
        profile: The measured layers.
        from_level: Block whose output is read now; 0: the frozen layers compute from the input.
        to_level: Block whose output is to be stored.
        missing: Fraction of the samples that the fill computes.

    Returns:
        At least one where all are missing; ``None`` where reading takes as long as computing, and nothing pays back.
    """
    computed_s = fill_seconds(profile, from_level, to_level, 1)
    before_s = computed_s + (read_seconds(profile, from_level) if from_level else 0.0)
    saved_s = before_s - read_seconds(profile, to_level)
    return missing * computed_s / saved_s if saved_s > 0 else None


def break_even_level(profile: Profile) -> int | None:
    """Returns the lowest level that pays, or ``None``. All higher ones pay too where outputs are equally wide."""
    levels = range(1, len(profile.layers) - 1)
    return next((level for level in levels if read_seconds(profile, level) < forward_seconds(profile, level)), None)

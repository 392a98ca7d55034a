"""Small caches over made-up samples, every feature of sample ``i`` the number ``i``; and a store's fingerprint."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autocache.capacity import CacheCapacity, FeatureFormat
from pipetransformer.autocache.communicator import Communicator, SingleProcess
from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autocache.source import SampleSource

LENGTHS, WIDTH = np.array([3, 1, 4, 2, 5]), 2
FORMAT = FeatureFormat(WIDTH, torch.float64)
FEW = 220  # bytes that hold some of the samples
OURS = StoreFingerprint(
    split_name="train",
    split_identity="ab" * 16,
    num_samples=64,
    num_tokens=320,
    hidden_size=16,
    capacity="4096 bytes of memory, 8192 of disk",
    storage_type="float32",
    precision="float32",
    model="some/vit_tiny TimmModel heads=2",
    device="cpu",
    torch_version="2.11",
)


def make_source(reads: list[int], lengths: np.ndarray = LENGTHS, name: str = "train") -> SampleSource:
    """Notes which samples are read."""

    def inputs(ids: np.ndarray, num_tokens: int) -> Tensor:
        reads.extend(ids.tolist())
        return torch.from_numpy(ids)[:, None, None].expand(-1, num_tokens, WIDTH).double()

    return SampleSource(name, lengths, WIDTH, inputs, lambda ids, num_tokens: {})


def make_cache(
    folder: Path, source: SampleSource, communicator: Communicator | None = None, memory_bytes: int = 1 << 20,
    disk_bytes: int = 0,
    persistent: bool = False, feature_format: FeatureFormat = FORMAT,
) -> AutoCache:  # fmt: skip
    capacity = CacheCapacity([source], feature_format, Budgets(memory_bytes, disk_bytes), persistent)
    return AutoCache(capacity, {source.name: folder}, communicator or SingleProcess())

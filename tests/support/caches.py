"""Small caches over made-up samples, every feature of sample ``i`` the number ``i``; and what a store is known by."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autocache.identity import Identity
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autocache.peers import Alone, Peers
from pipetransformer.autocache.room import Kind, Room
from pipetransformer.autocache.source import Source

LENGTHS, WIDTH = np.array([3, 1, 4, 2, 5]), 2
KIND = Kind(WIDTH, torch.float64)
FEW = 220  # bytes that hold some of the samples
OURS = Identity(
    split_name="train",
    split_identity="ab" * 16,
    num_samples=64,
    num_tokens=320,
    hidden_size=16,
    room="2 GiB memory, 20 GiB disk",
    storage_type="float32",
    precision="float32",
    model="some/vit_tiny TimmModel heads=2",
    device="cpu",
    torch_version="2.11",
)


def make_source(reads: list[int], lengths: np.ndarray = LENGTHS, name: str = "train") -> Source:
    """Notes which samples are read."""

    def inputs(ids: np.ndarray, num_tokens: int) -> Tensor:
        reads.extend(ids.tolist())
        return torch.from_numpy(ids)[:, None, None].expand(-1, num_tokens, WIDTH).double()

    return Source(name, lengths, inputs, lambda ids, num_tokens: {})


def make_cache(
    folder: Path, source: Source, peers: Peers | None = None, memory_bytes: int = 1 << 20, disk_bytes: int = 0,
    is_lasting: bool = False, kind: Kind = KIND,
) -> AutoCache:  # fmt: skip
    room = Room([source], kind, Budgets(memory_bytes, disk_bytes), is_lasting)
    return AutoCache(room, {source.name: folder}, peers or Alone())

"""Stores of samples for tests, and what other processes do to them."""

import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.buffer import SharedBuffer
from pipetransformer.autocache.layout import Budgets, assign_tiers
from pipetransformer.autocache.store import FeatureStore, StoreSpec
from pipetransformer.autocache.tier import Tier

HIDDEN, PLENTY = 3, 2**20
LENGTHS = np.array([3, 1, 4, 2, 5, 2, 6, 1])


def make_spec(folder: Path, memory: int = PLENTY, disk: int = 0, **options: Any) -> StoreSpec:
    defaults = {"storage": "exact", "shard_size": 3, "seed": 0, "dtype": torch.float32, "lengths": LENGTHS}
    path = folder / "store" / "train.features"
    return StoreSpec(budgets=Budgets(memory, disk), path=path, hidden_size=HIDDEN, **(defaults | options))


def features_of(ids: np.ndarray, num_tokens: int, key: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Features (B, T, D) that tell sample, token and key; past the end of a sample they are not zero."""
    tokens = torch.arange(num_tokens * HIDDEN).view(num_tokens, HIDDEN) / 128
    return (tokens + torch.from_numpy(ids)[:, None, None] + 10 * key).to(dtype)


def fill(store: FeatureStore, key: int) -> None:
    for number, ids in enumerate(store.shards):
        num_tokens = int(store.spec.lengths[ids].max())
        store.write(number, ids, features_of(ids, num_tokens, key, store.spec.dtype), key)


def padded(ids: np.ndarray, num_tokens: int, key: int) -> Tensor:
    """What a read of the samples must give."""
    real = torch.arange(num_tokens) < torch.from_numpy(LENGTHS[ids])[:, None]
    return features_of(ids, num_tokens, key) * real[:, :, None]


def in_other_process(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function of this module in a fresh process."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["support.preload"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(function, *args).result(timeout=120)


def write_there(spec: StoreSpec, key: int) -> dict[str, int]:
    store = FeatureStore.attach(spec)
    fill(store, key)
    sizes = store.bytes_by_tier
    store.close()
    return sizes


def bytes_there(address: str) -> bytes:
    return SharedBuffer.attach(address).bytes.numpy().tobytes()


def kill_inside_write(folder: Path, some: int | None, num_shards: int) -> list[list[str]]:
    """Rewrites some samples of the first shards, once for each line of the way, with a process that ends itself there.

    Returns:
        For each line, what then is true of each sample in each tier: ``old``, ``new`` or ``missing``;
        ``wrong`` for anything else, in any shard.
    """
    store = FeatureStore.create(make_spec(folder, PLENTY, PLENTY, persistent=True))
    states: list[list[str]] = []
    while True:
        fill(store, key=1)
        child = os.fork()
        if not child:
            _write_and_die(store, [ids[:some] for ids in store.shards[:num_shards]], line=len(states))
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            store.close()
            return states
        assert store.verify() == 0, "what is valid is intact"
        states.append([_state(tier, sample) for tier in store._tiers.values() for sample in range(len(LENGTHS))])


def _write_and_die(store: FeatureStore, shards: list[np.ndarray], line: int) -> None:
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("tier.py", "buffer.py")):
            return None
        if event == "line":
            if lines == line:
                os.kill(os.getpid(), signal.SIGKILL)
            lines += 1
        return trace

    features = features_of(np.concatenate(shards), int(LENGTHS.max()), 2)
    sys.settrace(trace)
    store.write_all(list(enumerate(shards)), features, key=2)
    os._exit(0)


def _state(tier: Tier, sample: int) -> str:
    ids, num_tokens = np.array([sample]), int(LENGTHS.max())
    valid = {key: bool(tier.valid(ids, key).all()) for key in (1, 2)}
    if not any(valid.values()):
        return "missing"
    rows = np.empty((1, num_tokens, HIDDEN * 4), dtype=np.uint8)
    tier.gather(ids, num_tokens, np.array([True]), rows)
    key = 1 if valid[1] else 2
    right = np.array_equal(rows.view(np.float32), padded(ids, num_tokens, key).numpy())
    return {1: "old", 2: "new"}[key] if right else "wrong"


def memory_growth(folder: Path, num_samples: int, by_tier: bool) -> int:
    """Writes and reads a file of samples of 1 MiB, by its tier or byte for byte through its mapping.

    Returns:
        By how many mapped bytes this process has grown.
    """
    lengths = np.full(num_samples, 64)
    layout = assign_tiers(lengths, 2**14, Budgets(0, 2**40), shard_size=8, seed=0, persistent=False).disk
    assert layout is not None
    buffer = SharedBuffer.file(folder / "grown", layout.num_bytes)
    tier, before = Tier(layout, buffer), _mapped_bytes()
    ids, rows = layout.ids, np.ones((8 * 64, 2**14), dtype=np.uint8)
    for shard in layout.shards:
        if by_tier:
            tier.write(shard, ids[layout.slots_of(shard)], rows, key=1)
            tier.gather(ids[:8], 64, np.ones(8, dtype=bool), rows.reshape(8, 64, -1))
        else:
            buffer.bytes[layout.rows_of(shard).start * 2**14 : layout.rows_of(shard).stop * 2**14] = 1
    growth = _mapped_bytes() - before
    buffer.close(unlink=True)
    return growth


def _mapped_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssFile:", "RssShmem:")))

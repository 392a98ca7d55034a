"""Runs a function as the ranks of a world, in processes of their own with one thread each."""

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from pipetransformer.runtime.groups import batch_scheduled

SEED, TIMEOUT_S = 1, 120.0


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``function(*arguments)`` on every rank and returns what it gives on rank 0."""
    with tempfile.TemporaryDirectory() as name:
        # forked: this process has imported all that they need, and computes nothing
        start_processes(_work, (Path(name), world, function, arguments), world, start_method="fork")
        return pickle.loads((Path(name) / "result").read_bytes())


def _work(rank: int, folder: Path, world: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"GROUP_RANK": "0", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}  # as torchrun does
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    store, timeout = f"file://{folder / 'store'}", timedelta(seconds=TIMEOUT_S)
    with batch_scheduled("cpu"):  # as a run does
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    result = function(*arguments)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()

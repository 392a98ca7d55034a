"""Shows that all loops do the same training: their losses, step by step, on this rank's world."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from experiments.peers.loops import plain
from experiments.peers.problem import Freezes, Problem
from experiments.peers.rank import PEERS, Peer, run
from pipetransformer.config.compose import compose_training

PLAIN = "plain"
LOOPS = {PLAIN: Peer("one process", plain), **PEERS}


def losses(names: Sequence[str], options: Sequence[str], freezes: Freezes) -> dict[str, list[float]]:
    """Trains with each loop from the same start, and returns the losses of each on rank 0. Every rank calls it."""
    with _as_torchrun():
        found = {name: run(LOOPS[name], Problem.load(compose_training(options)), freezes) for name in names}
    return {name: result["losses"] for name, result in found.items()}


@contextmanager
def _as_torchrun() -> Iterator[None]:
    """Sets what torchrun sets, by which accelerate and Lightning know the world that they are in."""
    world = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": dist.get_rank()}
    known = {name: str(value) for name, value in world.items()}
    more = {"LOCAL_WORLD_SIZE": known["WORLD_SIZE"], "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "agreement"}  # never used
    with mock.patch.dict(os.environ, known | more | meeting):
        yield

"""One rank of a peer's run: ``torchrun ... -m experiments.peers.rank <peer> <file> <options of train.py>``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.peers import frameworks, loops
from experiments.peers.problem import Freezes, Problem, Watch
from pipetransformer.config.compose import compose_training
from pipetransformer.report.event_log import write_json
from pipetransformer.training.world import open_world


@dataclass(frozen=True)
class Peer:
    """A way to train.

    Attributes:
        name: In the table.
        train: Its loop, on one rank.
        library: That it needs besides what the project depends on; installed by ``pip install <library>``.
    """

    name: str
    train: Callable[[Problem, Watch], None]
    library: str | None = None

    @property
    def is_installed(self) -> bool:
        return self.library is None or importlib.util.find_spec(self.library) is not None


PEERS = {
    "trainer": Peer("HF Trainer", frameworks.hugging_face, "accelerate"),
    "accelerate": Peer("accelerate", loops.accelerated, "accelerate"),
    "lightning": Peer("Lightning", frameworks.lightning, "lightning"),
    "ddp": Peer("DDP by hand", loops.data_parallel),
    "fsdp2": Peer("FSDP2 by hand", loops.sharded),
}


def run(peer: Peer, problem: Problem, freezes: Freezes) -> dict[str, Any]:
    """Trains on this rank. Every rank calls it.

    Returns:
        ``losses`` of every step over the global batch and ``metrics`` of every evaluation, on rank 0.
    """
    watch = Watch(problem, freezes)
    torch.manual_seed(1000 * problem.config.seed + dist.get_rank())  # ranks drop out different numbers
    problem.model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, on settings that are meant as they are
        peer.train(problem, watch)
    losses = torch.stack(problem.model.losses)
    dist.all_reduce(losses)
    return {"losses": (losses / dist.get_world_size()).tolist(), "metrics": watch.metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("file", type=Path, help="takes the results")
    parser.add_argument("--freezes", type=json.loads, default=[], help="[[step, blocks], ...]")
    parser.add_argument("options", nargs="*")
    given = parser.parse_intermixed_args()
    config = compose_training(given.options)
    with open_world(config.parallel):
        began = time.perf_counter()
        problem = Problem.load(config)
        loaded = time.perf_counter()
        found = run(PEERS[given.peer], problem, given.freezes)
        if dist.get_rank() == 0:
            seconds = {"load_seconds": loaded - began, "train_seconds": time.perf_counter() - loaded}
            write_json(given.file, found | seconds)


if __name__ == "__main__":
    main()

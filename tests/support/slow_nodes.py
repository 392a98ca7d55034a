"""``train.py`` where layers and messages between nodes are slow, whatever this machine does.

``slow_nodes.py ARGUMENTS then ARGUMENTS`` runs it twice; a start of all ranks takes longer than either.
"""

import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from pipetransformer.autopipe.profile import AffineTime  # noqa: E402
from pipetransformer.config.schema import Config  # noqa: E402
from pipetransformer.planning.planner import Planner  # noqa: E402
from pipetransformer.profiling import layers  # noqa: E402
from pipetransformer.profiling.network import Pair  # noqa: E402
from pipetransformer.profiling.overhead import StepOverheads  # noqa: E402
from pipetransformer.training import planner_setup as setup  # noqa: E402
from pipetransformer.training.run import run_rank  # noqa: E402
from support.jobs import corrected_by, made_up_profile, play  # noqa: E402
from support.nodes import NODE_ALL_REDUCE_S  # noqa: E402


def messages(_: torch.device, devices_per_node: int) -> tuple[Pair, Pair | None]:
    assert devices_per_node == 2, "as torchrun was told"
    return (1e-5, 1e10), (10.0, 1e10)


def all_reduces(_: torch.device, devices_per_node: int) -> tuple[Pair, Pair | None]:
    return (1e-3, 1e9), (NODE_ALL_REDUCE_S, 1e9)


MADE_UP = {
    "profile": made_up_profile,
    "measure_messages": messages,
    "measure_all_reduces": all_reduces,
    "measure_step_overheads": lambda *_: StepOverheads(0.0),
    "measure_reading": lambda *_: AffineTime(0.0, 0.0),
}

UNHINDERED = {"measure_contention": lambda *_, **__: 1.0, "measure_waiting": lambda *_, **__: 0.0}


def play_on_two_nodes(overrides: tuple[str, ...], folders: tuple[Path, Path]) -> str:
    """One of four ranks of the pool, two on each node; they cache in the folder of their node."""
    node, local_rank = divmod(dist.get_rank(), 2)

    def run(config: Config, *args: Any) -> None:
        run_rank(replace(config, cache=replace(config.cache, path=str(folders[node] / "features"))), *args)

    here = {"GROUP_RANK": str(node), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "2"}
    with (
        mock.patch.dict(os.environ, here),
        mock.patch.multiple(setup, **MADE_UP),
        mock.patch.multiple(layers, **UNHINDERED),
        mock.patch.object(Planner, "correct", corrected_by),
    ):
        return play(overrides, folders[0] / "run", made_up_times=False, run=run)


if __name__ == "__main__":
    Planner.correct = corrected_by  # type: ignore[method-assign]
    vars(setup).update(MADE_UP)
    vars(layers).update(UNHINDERED)
    then = sys.argv.index("then")
    for arguments in (sys.argv[1:then], sys.argv[then + 1 :]):
        sys.argv = [str(ROOT / "train.py"), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")

"""``train.py`` where layers and messages between nodes are slow, whatever this machine does.

``slow_nodes.py ARGUMENTS then ARGUMENTS`` runs it twice; a start of all ranks takes longer than either.
"""

import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from pipetransformer.autopipe.profile import AffineTime  # noqa: E402
from pipetransformer.planning.planner import Planner  # noqa: E402
from pipetransformer.profiling.network import Pair  # noqa: E402
from pipetransformer.profiling.overhead import StepOverheads  # noqa: E402
from pipetransformer.training import planner_setup as setup  # noqa: E402
from support.jobs import made_up_profile  # noqa: E402
from support.nodes import NODE_ALL_REDUCE_S  # noqa: E402


def messages(_: torch.device, devices_per_node: int) -> tuple[Pair, Pair | None]:
    assert devices_per_node == 2, "as torchrun was told"
    return (1e-5, 1e10), (10.0, 1e10)


def all_reduces(_: torch.device, devices_per_node: int) -> tuple[Pair, Pair | None]:
    return (1e-3, 1e9), (NODE_ALL_REDUCE_S, 1e9)


if __name__ == "__main__":
    made_up = {
        "measure_messages": messages,
        "measure_all_reduces": all_reduces,
        "measure_step_overheads": lambda *_: StepOverheads(0.0),
        "measure_reading": lambda *_: AffineTime(0.0, 0.0),
    }
    Planner.correct = lambda planner, plan, _: planner.predict(plan)  # type: ignore[method-assign]
    vars(setup).update(profile=made_up_profile, **made_up)
    then = sys.argv.index("then")
    for arguments in (sys.argv[1:then], sys.argv[then + 1 :]):
        sys.argv = [str(ROOT / "train.py"), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")

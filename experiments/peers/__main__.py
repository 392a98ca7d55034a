"""Whole runs of the elastic trainer and of its peers: ``python -m experiments.peers <folder> <workload> <options>``.

``<options>`` are paths and what else of ``train.py`` is to differ. The arms take turns within a seed. A run that is
complete in the folder is not repeated, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.arms import TOOK, Arm, numbers, train
from experiments.measured import Took, run_measured
from experiments.peers.rank import PEERS
from experiments.peers.tables import Result, table
from experiments.peers.workloads import WORKLOADS, Workload
from experiments.record import publish
from pipetransformer.report.run_folder import Run

NUM_RANKS = 2
COMMON = (f"parallel.world_size={NUM_RANKS}", "parallel.device=cpu", "checkpoint=off")
FREEZE = ("freeze=pipetransformer", "freeze.interval=0.2")  # four decisions
EVERYTHING, STATIC, HALF = "ours, everything", "ours, parallel=data", "ours, parallel=data, half the epochs"
OURS = (
    Arm(EVERYTHING, FREEZE),  # first: the peers freeze as it did
    Arm(STATIC, ("freeze=none", "parallel=data")),
    Arm(HALF, ("freeze=none", "parallel=data")),
    Arm("ours, parallel=pipeline", ("freeze=none", "parallel=pipeline")),
    Arm("ours, elastic without freezing", ("freeze=none",)),
)
CLAIM = (EVERYTHING, STATIC, HALF)
"""The arms that tell whether freezing costs accuracy; the others are the same mathematics at another speed."""


@dataclass(frozen=True)
class PeerArm:
    """A peer's run, as it is or with the freeze decisions of ours."""

    peer: str
    freezes: bool

    @property
    def name(self) -> str:
        return PEERS[self.peer].name + ", freezing as ours" * self.freezes


PEER_ARMS = tuple(PeerArm(peer, freezes) for peer in PEERS for freezes in (False, True))


def run_seed(
    workload: Workload, seed: int, folder: Path, options: Sequence[str], is_brief: bool = False
) -> Iterator[Result]:
    """Runs all arms of a seed one after the other, or those of :data:`CLAIM` alone."""
    given, freezes = (*workload.options, *COMMON, *options), list[tuple[int, int]]()
    for arm in OURS:
        if is_brief and arm.name not in CLAIM:
            continue
        epochs = workload.epochs // 2 if arm.name == HALF else workload.epochs
        outcome = train(arm, seed, folder, (*given, f"epochs={epochs}"), {})
        if arm.name == EVERYTHING:
            freezes = outcome.prefixes
        is_static = arm.name not in (EVERYTHING, HALF)
        times = outcome.seconds, outcome.cpu_seconds, after_loading(outcome.run)
        share = outcome.summary.get("share_of_limit")
        yield Result(arm.name, seed, outcome.metric, *times, is_static, outcome.prefixes, share)
    for arm in () if is_brief else PEER_ARMS:
        if not PEERS[arm.peer].is_installed:
            print(f"{arm.name} is left out: pip install {PEERS[arm.peer].library}", flush=True)
            continue
        own = (*given, f"epochs={workload.epochs}", f"seed={seed}")
        yield run_peer(arm, seed, folder, own, freezes if arm.freezes else [])


def after_loading(run: Run) -> float:
    """Returns the seconds of our run from where data and model are there to its last evaluation, measuring included."""
    began = next(event["time"] for event in run.events["phase"] if event["message"].startswith("measuring"))
    ended = run.events["evaluate"][-1]["time"]
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()


def run_peer(
    arm: PeerArm, seed: int, folder: Path, options: Sequence[str], freezes: Sequence[tuple[int, int]]
) -> Result:
    """Runs a peer with torchrun, unless it is complete, and returns what came out."""
    run_dir = folder / f"{arm.peer}{'-freezing' * arm.freezes}-{seed}"
    file = run_dir / "result.json"
    if not (run_dir / TOOK).is_file():
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        rank = ["-m", "experiments.peers.rank", arm.peer, str(file), "--freezes", json.dumps(freezes), *options]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        run_measured([*launch, *rank], run_dir / TOOK, env)
    took, found = Took.read(run_dir / TOOK), json.loads(file.read_text(encoding="utf-8"))
    metric = next(iter(found["metrics"][-1].values()))
    times = took.seconds, took.cpu_seconds, found["train_seconds"]
    return Result(arm.name, seed, metric, *times, not arm.freezes, list(freezes))


def run_workload(
    name: str, folder: Path, options: Sequence[str], seeds: Sequence[int], brief_seeds: Sequence[int] = ()
) -> list[Result]:
    """Runs the arms of a workload, and keeps their results in its folder."""
    results = list[Result]()
    for seed in dict.fromkeys((*seeds, *brief_seeds)):
        for result in run_seed(WORKLOADS[name], seed, folder / name, options, seed in brief_seeds):
            print(f"seed {seed}, {result.arm}: {result.metric:.4f}, {result.seconds:.0f} s", flush=True)
            results.append(result)
    (folder / name / "results.json").write_text(json.dumps([asdict(result) for result in results]), encoding="utf-8")
    return results


def collect(folder: Path) -> dict[str, list[Result]]:
    """Returns the results of all workloads that have run in a folder."""
    files = {name: folder / name / "results.json" for name in WORKLOADS}
    found = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}
    return {name: [Result(**result) for result in results] for name, results in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("options", nargs="*", help="of train.py: model.name=, dataset.path=")
    parser.add_argument("--seeds", type=numbers, default=(1, 2, 3))
    parser.add_argument(
        "--brief-seeds", type=numbers, default=(), help=f"with which only these run: {'; '.join(CLAIM)}"
    )
    parser.add_argument("--into", type=Path, default=Path(__file__).parent, help="whose README.md takes the tables")
    given = parser.parse_intermixed_args(arguments)
    folder = given.folder.absolute()
    run_workload(given.workload, folder, given.options, given.seeds, given.brief_seeds)
    found = collect(folder)
    tables = "\n\n".join(f"**{WORKLOADS[name].name}**\n\n{table(results)}" for name, results in found.items())
    kept: dict[str, Any] = {name: [asdict(result) for result in results] for name, results in found.items()}
    publish(tables, kept, given.into)


if __name__ == "__main__":
    main()

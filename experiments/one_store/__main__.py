"""Trains nine jobs on one frozen prefix in four ways: ``python -m experiments.one_store <folder> <options>``.

``<options>`` are those of ``train.py``: model, data, prefix, epochs. The ways take turns within each seed. A command
that is complete in the folder is not repeated, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.one_store.plain import FILE, RECOMPUTES
from experiments.record import markdown, publish
from pipetransformer.report.event_log import write_json
from pipetransformer.report.run_folder import read_run

RATES, SEEDS = (1e-4, 3e-4, 1e-3), (1, 2, 3)
STORE, WITHOUT = "store", "without"
WAYS = {  # in the order in which they take turns
    STORE: "one store",
    WITHOUT: "no store",
    RECOMPUTES: "SetFit's way",
    FILE: "plain PyTorch's way",
}
DONE = "seconds.json"
NO_DROPOUT = ("model.options.hidden_dropout_prob=0", "model.options.attention_probs_dropout_prob=0")
COMMON = (*NO_DROPOUT, "parallel=single", "parallel.world_size=1")  # nothing is drawn that could differ


@dataclass(frozen=True)
class Job:
    """One job of a way.

    Attributes:
        seconds: From the first line that it logs to the last; by hand from reading the data on.
        losses: Of every step.
    """

    way: str
    seed: int
    rate: float
    metric: float
    seconds: float
    losses: tuple[float, ...]


def run(way: str, seed: int, folder: Path, options: Sequence[str]) -> list[Job]:
    """Runs the jobs of a way and a seed with one command, unless it is complete, and returns them."""
    own = folder / f"{way}-{seed}"
    if not (own / DONE).is_file():
        began = time.perf_counter()
        subprocess.run(command(way, seed, own, options), check=True, stdout=subprocess.DEVNULL, env=_one_thread())
        write_json(own / DONE, {"seconds": time.perf_counter() - began})
    by_hand = own / "jobs.json"
    return _by_hand(way, seed, by_hand) if by_hand.is_file() else _jobs(way, seed, own)


def command(way: str, seed: int, folder: Path, options: Sequence[str]) -> list[str]:
    """Returns the command for the jobs of a way and a seed."""
    common = [*options, *COMMON, f"seed={seed}"]
    if way in (RECOMPUTES, FILE):
        rates = map(str, RATES)
        return [sys.executable, "-m", "experiments.one_store.plain", way, str(folder), *common, "--rates", *rates]
    swept = [f"optim.lr={','.join(map(str, RATES))}", f"hydra.sweep.dir={folder}", "logger=none", "checkpoint=off"]
    cache = f"cache.path={folder.parent / 'stores'}" if way == STORE else "cache=off"
    return [sys.executable, "train.py", "-m", *common, *swept, cache]


def _one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _by_hand(way: str, seed: int, file: Path) -> list[Job]:
    found = json.loads(file.read_text(encoding="utf-8"))
    return [Job(way, seed, one["lr"], one["metric"], one["seconds"], tuple(one["losses"])) for one in found]


def _jobs(way: str, seed: int, folder: Path) -> list[Job]:
    """Reads the jobs of a sweep."""
    return [_job(way, seed, rate, folder / str(number)) for number, rate in enumerate(RATES)]


def _job(way: str, seed: int, rate: float, folder: Path) -> Job:
    record = read_run(folder)
    times = [datetime.fromisoformat(event["time"]) for events in record.events.values() for event in events]
    losses = tuple(step["loss"] for step in record.events["step"])
    seconds = (max(times) - min(times)).total_seconds()
    return Job(way, seed, rate, record.summary["metric"]["value"], seconds, losses)


def differences(jobs: Sequence[Job]) -> dict[str, float]:
    """Returns for each way the largest difference of a step's loss from that of the same job without a store."""
    reference = {(job.seed, job.rate): job.losses for job in jobs if job.way == WITHOUT}
    largest = dict.fromkeys(WAYS, 0.0)
    for job in jobs:
        for own, other in zip(job.losses, reference[job.seed, job.rate], strict=True):
            largest[job.way] = max(largest[job.way], abs(own - other))
    return largest


def table(jobs: Sequence[Job], seconds: dict[str, float]) -> str:
    """Returns a row for each job, and the whole.

    Args:
        seconds: Wall time of the commands of each way, start-up included.
    """
    found = {(job.way, job.seed, job.rate): job for job in jobs}
    header = ["job", *(f"{name}: accuracy · s" for name in WAYS.values())]
    rows = [
        [f"seed {seed}, rate {rate:g}", *(_cell(found[way, seed, rate]) for way in WAYS)]
        for seed in SEEDS
        for rate in RATES
    ]
    rows.append(["accuracy, mean", *(f"{mean(job.metric for job in jobs if job.way == way):.4f}" for way in WAYS)])
    largest = differences(jobs)
    rows.append(["largest difference of a step's loss from no store", *(f"{largest[way]:.1e}" for way in WAYS)])
    rows.append(["commands, start-up included", *(f"{seconds[way]:.0f} s" for way in WAYS)])
    rows.append(["times the time of one store", *(f"{seconds[way] / seconds[STORE]:.2f}" for way in WAYS)])
    return markdown(header, rows)


def _cell(job: Job) -> str:
    return f"{job.metric:.4f} · {job.seconds:.0f}"


def main(folder: Path, options: Sequence[str], into: Path | None = None) -> None:
    """Trains all jobs in all ways and shows the table."""
    jobs, seconds = list[Job](), dict.fromkeys(WAYS, 0.0)
    for seed in SEEDS:
        for way in WAYS:
            jobs += run(way, seed, folder, options)
            took = json.loads((folder / f"{way}-{seed}" / DONE).read_text(encoding="utf-8"))["seconds"]
            seconds[way] += took
            print(f"seed {seed}, {WAYS[way]}: {took:.0f} s", flush=True)
    results: dict[str, Any] = {"seconds": seconds, "differences": differences(jobs)}
    results["jobs"] = [{name: value for name, value in asdict(job).items() if name != "losses"} for job in jobs]
    publish(table(jobs, seconds), results, into)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, epilog="Further arguments are options of every run.")
    parser.add_argument("folder", type=Path, help="receives the runs; one that is complete is not made again")
    arguments, further = parser.parse_known_args()
    main(arguments.folder.absolute(), further, Path(__file__).parent)

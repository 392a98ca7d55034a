"""Times the runtime's step against a plain DDP loop: ``python -m experiments.step_time.step_time``.

Both loops live in the same two processes and take turns, so that whatever else the machine does falls on both.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Protocol

import torch
import torch.distributed as dist

from experiments.ranks import run_ranks
from experiments.record import markdown, publish
from experiments.step_time.cases import CASES, Case, write_bert
from experiments.step_time.loops import ElasticLoop, Loop, PlainLoop

NUM_REPLICAS, NUM_WARMUP_STEPS, FEWEST_ROUNDS = 2, 3, 2
HEADER = (
    "model",
    "parameters",
    "plain DDP, ms",
    "runtime, ms",
    "runtime / plain, median",
    "quartiles",
    "in CPU time",
    "rounds",
)
WALL, CPU = 0, 1
Turn = tuple[float, float]  # the median step in seconds: by the clock, and of this process's CPU time


@dataclass(frozen=True)
class Times:
    """The time of both loops in each round, on rank 0."""

    name: str
    num_parameters: int
    plain: tuple[Turn, ...]
    elastic: tuple[Turn, ...]

    def ratios(self, kind: int) -> list[float]:
        """Returns runtime over plain loop in each round; kind is :data:`WALL` or :data:`CPU`."""
        return [elastic[kind] / plain[kind] for plain, elastic in zip(self.plain, self.elastic, strict=True)]


def measure(case: Case, folder: Path, seconds: float, num_steps: int) -> Times:
    """Times both loops on this rank, in rounds: each loop has one turn, and every other round the other goes first.

    Args:
        folder: Where BERT's config.json lies.
        seconds: After which no round begins; short steps get more rounds, whose median they need.
        num_steps: Steps of a turn.
    """
    plain, elastic = (loop(case.stack(folder), case.split(), case.batch_size) for loop in (PlainLoop, ElasticLoop))
    turns: dict[Loop, list[Turn]] = {plain: [], elastic: []}
    warm_up(plain, elastic, same_losses=not case.dropout)
    end_s = time.perf_counter() + seconds
    while goes_on(len(turns[plain]), end_s):
        for loop in (plain, elastic) if len(turns[plain]) % 2 else (elastic, plain):
            turns[loop].append(take_turn(loop, num_steps))
    num_parameters = sum(parameter.numel() for parameter in case.stack(folder).parameters())
    return Times(case.name, num_parameters, tuple(turns[plain]), tuple(turns[elastic]))


def warm_up(plain: Loop, elastic: Loop, same_losses: bool) -> None:
    """The first steps, which allocate; where nothing is drawn, losses show that both loops do the same training."""
    for _ in range(NUM_WARMUP_STEPS):
        plain.step()
        elastic.step()
        losses = torch.tensor([plain.loss(), elastic.loss()])
        dist.all_reduce(losses)
        assert not same_losses or torch.allclose(losses[0], losses[1], rtol=1e-4), losses


def goes_on(num_rounds: int, end_s: float) -> bool:
    """Returns True where another round begins, by rank 0's clock."""
    is_partial = torch.tensor(num_rounds < FEWEST_ROUNDS or time.perf_counter() < end_s)
    dist.broadcast(is_partial, src=0)
    return bool(is_partial)


class Steps(Protocol):
    """Something that is timed step by step."""

    def step(self) -> None: ...


def take_turn(loop: Steps, num_steps: int) -> Turn:
    dist.barrier()
    wall_s, cpu_s = [], []
    for _ in range(num_steps):
        wall, cpu = time.perf_counter(), time.process_time()
        loop.step()
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    return median(wall_s), median(cpu_s)


def measure_all(cases: Sequence[Case], seconds: float, num_steps: int) -> list[Times]:
    """Times the cases one after the other on this rank."""
    with tempfile.TemporaryDirectory() as name:
        write_bert(Path(name))
        return [measure(case, Path(name), seconds, num_steps) for case in cases]


def row(times: Times) -> tuple[str, ...]:
    ratios = times.ratios(WALL)
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return (
        times.name,
        f"{times.num_parameters:,}",
        f"{1000 * median(turn[WALL] for turn in times.plain):.1f}",
        f"{1000 * median(turn[WALL] for turn in times.elastic):.1f}",
        f"{median(ratios):.3f}",
        f"{low:.3f}-{high:.3f}",
        f"{median(times.ratios(CPU)):.3f}",
        f"{len(ratios)}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=80, help="of each model")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn")
    parser.add_argument(
        "--cases",
        type=int,
        nargs="+",
        choices=range(len(CASES)),
        default=range(len(CASES)),
        help="rows of the table, from 0",
    )
    parser.add_argument("--into", type=Path, help="folder whose results.json and README.md take the results")
    options = parser.parse_args(arguments)
    cases = [CASES[index] for index in options.cases]
    times = run_ranks(NUM_REPLICAS, measure_all, cases, options.seconds, options.steps)
    table = markdown(HEADER, map(row, times))
    publish(table, [asdict(case) for case in times], options.into)


if __name__ == "__main__":
    main()

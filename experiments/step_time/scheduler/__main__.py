"""Times steps whose collectives may not take a core from others: ``python -m experiments.step_time.scheduler``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import torch.distributed as dist

from experiments.ranks import run_ranks
from experiments.step_time.cases import CASES, Case, write_bert
from experiments.step_time.in_turns import Timed, publish_turns, read_options, take_turns
from experiments.step_time.loops import ElasticLoop
from experiments.step_time.step_time import Turn
from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime import groups

WORLD, SUMS = 2, 20
SIZES = {"sum of one number": 1, "sum of 400 kB": 10**5, "sum of 4 MB": 10**6}
HEADER = ("model", "what is timed", "plain, ms", "`SCHED_BATCH`, ms", "ratio", "quartiles", "in CPU time", "rounds")


@contextmanager
def as_linux_schedules() -> Iterator[None]:
    """Leaves the threads of process groups the policy that the process has."""
    with mock.patch.object(groups, "batch_scheduled", nullcontext):
        yield


ARMS: dict[str, Callable[[], AbstractContextManager[None]]] = {"plain": as_linux_schedules, "batch": nullcontext}
"""Under which the process groups of an arm are made; ``batch`` is what a run does."""


class Summing:
    """Sums over all ranks in place of a step."""

    def __init__(self, size: int, group: dist.ProcessGroup) -> None:
        self._numbers, self._group = torch.ones(size), group

    def step(self) -> None:
        for _ in range(SUMS):
            dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=self._group)


def plans(num_layers: int) -> dict[str, Plan]:
    """Returns plans of two devices whose stages have about equally many layers."""
    half, last = num_layers // 2, num_layers - 1

    def pipeline(num_microbatches: int, schedule: str) -> Plan:
        return Plan(0, 0, ((0, half - 1), (half, last)), 1, num_microbatches, schedule=schedule)

    return {
        "replicas": Plan(0, 0, ((0, last),), WORLD, 1),
        "replicas, two thirds frozen": Plan(2 * (num_layers - 2) // 3, 0, ((0, last),), WORLD, 1),
        "2 stages, 4 micro-batches": pipeline(4, "1f1b"),
        "2 stages, 8 micro-batches": pipeline(8, "gpipe"),
    }


def measure_sums(num_rounds: int) -> list[Timed]:
    """Times sums over one group of each arm in turns; a step is several sums, and the times are of one."""
    made = {}
    for arm, context in ARMS.items():
        with context(), groups.batch_scheduled("cpu"):
            made[arm] = dist.new_group([*range(WORLD)])
    found = []
    for name, size in SIZES.items():
        before, after = take_turns({arm: Summing(size, group) for arm, group in made.items()}, num_rounds, num_steps=1)
        found.append(Timed("-", name, each(before), each(after)))
    return found


def each(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    return tuple((wall / SUMS, cpu / SUMS) for wall, cpu in turns)


def measure(case: Case, num_rounds: int, num_steps: int) -> list[Timed]:
    """Times each plan with the groups of each arm in turns."""
    found = []
    with TemporaryDirectory() as name:
        write_bert(Path(name))
        loops = dict[str, ElasticLoop]()
        for arm, context in ARMS.items():
            with context():
                loops[arm] = ElasticLoop(case.stack(Path(name)), case.split(), case.batch_size)
        for plan_name, plan in plans(len(case.stack(Path(name)))).items():
            for arm, context in ARMS.items():
                with context():
                    loops[arm].runtime.apply_plan(plan)
            gc.freeze()
            found.append(Timed(case.name, plan_name, *take_turns(loops, num_rounds, num_steps)))
        for loop in loops.values():
            loop.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    given = read_options(__doc__, arguments)
    found = run_ranks(WORLD, measure_sums, given.rounds)
    for index in (0, 2):
        found += run_ranks(WORLD, measure, CASES[index], given.rounds, given.steps)
    publish_turns(HEADER, found, given.into)


if __name__ == "__main__":
    main()

"""Times pipelines whose stages ask for messages early, and late: ``python -m experiments.step_time.receives``."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from experiments.ranks import run_ranks
from experiments.step_time.cases import CASES, Case, write_bert
from experiments.step_time.in_turns import Timed, publish_turns, read_options, take_turns
from experiments.step_time.loops import ElasticLoop
from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime import engine

WORLD = 2
HEADER = ("model", "plan", "asked late, ms", "asked early, ms", "ratio", "quartiles", "in CPU time", "rounds")


@contextmanager
def asking(early: bool) -> Iterator[None]:
    """Has every schedule that is made inside ask early, or late."""
    with mock.patch.object(engine, "receives_early", return_value=early):
        yield


def plans(num_layers: int) -> dict[str, Plan]:
    """Returns pipelines of two devices whose stages have about equally many layers."""

    def pipeline(num_stages: int, num_microbatches: int, schedule: str) -> Plan:
        bounds = [round(num_layers * stage / num_stages) for stage in range(num_stages + 1)]
        stages = tuple((first, end - 1) for first, end in pairwise(bounds))
        return Plan(0, 0, stages, 1, num_microbatches, schedule, stages_per_rank=num_stages // WORLD)

    return {
        "1F1B, 4 micro-batches": pipeline(2, 4, "1f1b"),
        "1F1B, 8 micro-batches": pipeline(2, 8, "1f1b"),
        "GPipe, 4 micro-batches": pipeline(2, 4, "gpipe"),
        "GPipe, 8 micro-batches": pipeline(2, 8, "gpipe"),
        "interleaved 1F1B, 4 stages, 4 micro-batches": pipeline(4, 4, "interleaved1f1b"),
    }


def measure(case: Case, num_rounds: int, num_steps: int) -> list[Timed]:
    """Times each plan in both ways in turns."""
    found = []
    with TemporaryDirectory() as name:
        write_bert(Path(name))
        ways = (False, True)
        loops = {str(early): ElasticLoop(case.stack(Path(name)), case.split(), case.batch_size) for early in ways}
        for plan_name, plan in plans(len(case.stack(Path(name)))).items():
            for early, loop in zip(ways, loops.values(), strict=True):
                with asking(early):
                    loop.runtime.apply_plan(plan)
                    loop.step()  # makes the schedule
            gc.freeze()
            found.append(Timed(case.name, plan_name, *take_turns(loops, num_rounds, num_steps)))
        for loop in loops.values():
            loop.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    given = read_options(__doc__, arguments)
    found = [timed for index in (0, 4) for timed in run_ranks(WORLD, measure, CASES[index], given.rounds, given.steps)]
    publish_turns(HEADER, found, given.into)


if __name__ == "__main__":
    main()

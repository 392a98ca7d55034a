"""Traces steps of given plans on the ranks of a world."""

from pathlib import Path

from pipetransformer.autopipe.plan import Plan
from pipetransformer.training.clock import Clock
from pipetransformer.training.ledger import Entry, Ledger
from pipetransformer.training.tracer import Tracer
from support.cases import NUM_BLOCKS, Case
from support.observations import one_step
from support.trainings import build, go

STEPS_PER_PLAN = 2


def trace_plans(case: Case, plans: list[Plan], folder: str) -> list[str]:
    """Goes from plan to plan, a decision apart; the traces are in the folder, and their names come back."""
    runtime, feed, groups = build(case, folder)
    num_steps = STEPS_PER_PLAN * len(plans)
    ledger = Ledger(NUM_BLOCKS, may_cache=True)
    clock = Clock(case.num_samples, case.batch_size, num_steps, num_steps, decision_every=STEPS_PER_PLAN)
    tracer = Tracer(Path(folder), runtime.recorder, clock, ledger)
    for step in range(num_steps):
        if step % STEPS_PER_PLAN == 0:
            plan = plans[step // STEPS_PER_PLAN]
            go(runtime, feed, plan)
            ledger.plan(Entry(plan, step, ""))
        with tracer.step(step):
            one_step(runtime, feed, case, step)
        ledger.step(case.batch_size, seconds=1.0)
    feed.close()
    groups.close()
    return tracer.files

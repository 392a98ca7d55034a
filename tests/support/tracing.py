"""Traces steps of given plans on the ranks of a world."""

from pathlib import Path

from pipetransformer.autopipe.plan import Plan
from pipetransformer.planning.history import PlanRecord, RunHistory
from pipetransformer.planning.timeline import Timeline
from pipetransformer.training.tracer import Tracer
from support.cases import NUM_BLOCKS, Case
from support.observations import one_step
from support.trainings import build, go

STEPS_PER_PLAN = 2


def trace_plans(case: Case, plans: list[Plan], folder: str) -> list[str]:
    """Goes from plan to plan, a decision apart; the traces are in the folder, and their names come back."""
    runtime, loader, groups = build(case, folder)
    num_steps = STEPS_PER_PLAN * len(plans)
    history = RunHistory(NUM_BLOCKS, may_cache=True)
    timeline = Timeline(case.num_samples, case.batch_size, num_steps, num_steps, decision_every=STEPS_PER_PLAN)
    tracer = Tracer(Path(folder), runtime.recorder, timeline, history)
    for step in range(num_steps):
        if step % STEPS_PER_PLAN == 0:
            plan = plans[step // STEPS_PER_PLAN]
            go(runtime, loader, plan)
            history.plan(PlanRecord(plan, step, ""))
        with tracer.step(step):
            one_step(runtime, loader, case, step)
        history.step(case.batch_size, seconds=1.0)
    loader.close()
    groups.close()
    return tracer.files

"""Trainings over a cache that holds a part of the samples, whose ranks lend each other layers for the others."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.training.transitions import Transitions
from support.cases import Case
from support.plans import HEAD, plan
from support.trainings import CachedLoader, Plans, Trace, build, go, ids_of, moments, rate

CACHED, BACK = 2, 5  # steps
PLANS: Plans = {
    0: plan(0, 0, [3, HEAD], 1, 2),
    CACHED: plan(4, 4, [HEAD], 2, 1),  # rank 1 borrows layers 0 to 3
    BACK: plan(0, 0, [1, HEAD], 1, 2),  # and gets 2 and 3
}


def _probe(runtime: ElasticRuntime, loader: CachedLoader) -> None:
    with runtime.frozen_forward(2, 2):
        pass


def _gather(runtime: ElasticRuntime, loader: CachedLoader) -> None:
    runtime.weights()


def _go_back(runtime: ElasticRuntime, loader: CachedLoader) -> None:
    history = SimpleNamespace(plan=lambda record: None)
    state: Any = SimpleNamespace(step=BACK, guard=SimpleNamespace(mean_norm=0.0), overhead_s=0.0, history=history)
    planner: Any = SimpleNamespace(predict=lambda plan: 1.0, cluster=SimpleNamespace(num_devices=2, device_name=None))
    timeline: Any = None  # it asks for none
    transitions = Transitions(planner, runtime, loader.cache_session, timeline, state, Reporter())
    transitions.replace(replace(PLANS[BACK], predicted_step_s=1.0), "", lambda: None, 0.0)


EVENTS = {"features are probed": (4, _probe), "weights are gathered": (4, _gather), "goes back": (BACK, _go_back)}
"""What happens before a step while layers are borrowed."""


def train_with_loans(case: Case, name: str, folder: str) -> Trace:
    """Every rank calls it."""
    runtime, loader, groups = build(case, folder)
    trace, (at, happen) = Trace(), EVENTS[name]
    for step in range(case.num_steps):
        if step == at:
            happen(runtime, loader)
        if step in PLANS and PLANS[step] != runtime.plan:
            go(runtime, loader, PLANS[step], step)
        result = runtime.train_step(loader, ids_of(case, step), step, rate(step))
        trace.losses.append(result.loss)
        trace.norms.append(result.total_norm)
    loader.cache_session.release()
    trace.moments, trace.weights = moments(runtime), runtime.weights() or {}
    loader.close()
    groups.close()
    return trace

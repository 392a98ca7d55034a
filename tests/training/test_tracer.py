"""A traced step is what the simulator draws for the same plan, with the times of a real run."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.cases import NUM_BLOCKS, Case
from support.jobs import TINY, run_job
from support.plans import HEAD, PIPE_TO_DATA, plan
from support.pool import Pool
from support.tracing import trace_plans

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.autopipe.schedules import SCHEDULES
from pipetransformer.planning.history import NUM_WARMUP_STEPS, PlanRecord, RunHistory
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.summary_text import summary_rows
from pipetransformer.report.trace import COMPUTE, Event, pass_name
from pipetransformer.runtime.tracing import Recorder, Span
from pipetransformer.simulate.step import step_events
from pipetransformer.training.tracer import Notes, Tracer, is_due, measured_events

TWO_STAGES = Plan(0, 0, ((0, 1), (2, 3)), 1, 1)
Row = dict[str, Any]
WORLD = 4
PLANS = {
    "4 stages": PIPE_TO_DATA[0],
    "2 stages x 2": PIPE_TO_DATA[2],
    "1 stage x 4": PIPE_TO_DATA[4],
    "interleaved": replace(plan(0, 0, [1, 3, 5, HEAD], 2, 4, "interleaved1f1b"), stages_per_rank=2),
    "frozen stage below and an idle rank": plan(4, 0, [3, 5, HEAD], 1, 4),
    "frozen stage below, gpipe, replicas side by side": replace(
        plan(2, 0, [2, HEAD], 2, 3, "gpipe"), rank_order="replica-first"
    ),
    "checkpoint, several micro-batches on one stage": replace(plan(1, 0, [HEAD], 2, 3), recompute=True),
}


@pytest.fixture(scope="module")
def traces(pool: Pool, bert_config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    """The spans of a step of each plan, by time."""
    folder = tmp_path_factory.mktemp("traces")
    files, *others = pool.run(WORLD, trace_plans, Case("vit", bert_config), list(PLANS.values()), str(folder))
    assert files == [f"trace_{number}.json" for number in range(len(PLANS))]
    assert others == [[]] * (WORLD - 1), "rank 0 writes"
    return {name: spans(folder / file) for name, file in zip(PLANS, files, strict=True)}


def spans(file: Path) -> list[Row]:
    rows = json.loads(file.read_text())["traceEvents"]
    return sorted((row for row in rows if row["ph"] == "X"), key=lambda row: row["ts"])


def end(row: Row) -> float:
    return row["ts"] + row["dur"]


def on_every_plan(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("name", PLANS)(test)


def passes(plan: Plan, rank: int) -> list[str]:
    """What torch's schedule of that name runs on a rank; a stage without active layers has no backward pass."""
    topology = Topology(plan, rank)
    own = [] if topology.is_idle else SCHEDULES[plan.schedule].order(plan, topology.device)
    active = [one for one in own if one.is_forward or plan.stages[one.stage][1] >= plan.first_active_layer]
    return [pass_name(one.is_forward, one.microbatch, one.stage, plan.stages_per_rank) for one in active]


@on_every_plan
def test_each_rank_runs_every_pass_of_its_stages_once_in_the_order_of_the_schedule(
    name: str, traces: dict[str, list[Row]]
) -> None:
    for rank in range(WORLD):
        ran = [row["name"] for row in traces[name] if row["pid"] == rank and row["cat"] in ("forward", "backward")]
        assert ran == passes(PLANS[name], rank)


@on_every_plan
def test_the_names_are_those_of_the_simulated_step(name: str, traces: dict[str, list[Row]]) -> None:
    second = AffineTime(0.0, 1.0)
    layer = LayerProfile("layer", second, second, second, 0.5, 1000, 0, 10)
    profile, cluster = Profile((layer,) * (NUM_BLOCKS + 2), 2.0), Cluster(WORLD, None, Link(0.1, 100.0))
    simulated = step_events(profile, cluster, PLANS[name], batch_size=8)
    expected = {(event.name, event.category, event.rank) for event in simulated}
    for replica in range(PLANS[name].num_replicas):
        measured = set()
        for row in traces[name]:
            topology = Topology(PLANS[name], row["pid"])
            assert not topology.is_idle, "an idle rank does nothing"
            if topology.replica == replica:
                measured.add((row["name"], row["cat"], topology.device))
        assert measured == expected


@on_every_plan
def test_no_rank_computes_two_things_at_once(name: str, traces: dict[str, list[Row]]) -> None:
    for rank in range(WORLD):
        own = [row for row in traces[name] if row["pid"] == rank and row["cat"] in COMPUTE]
        assert all(end(before) <= after["ts"] + 1e-3 for before, after in pairwise(own))
        assert all(row["dur"] > 0 and row["ts"] >= 0 for row in own)


@on_every_plan
def test_a_result_is_sent_after_it_was_computed_and_before_it_is_used(name: str, traces: dict[str, list[Row]]) -> None:
    plan = PLANS[name]
    starts = {(row["pid"], row["ts"]) for row in traces[name] if row["cat"] in ("forward", "backward")}
    ends = {(row["pid"], row["name"]): end(row) for row in traces[name]}
    for row in traces[name]:
        if row["cat"] == "transfer":
            assert row["ts"] >= ends[row["pid"], row["name"].removeprefix("send ")] - 1e-3
            assert any(pid != row["pid"] and abs(end(row) - start) < 1e-3 for pid, start in starts), plan


@on_every_plan
def test_gradients_are_averaged_between_the_last_backward_pass_and_the_update(
    name: str, traces: dict[str, list[Row]]
) -> None:
    for row in traces[name]:
        if row["cat"] == "all-reduce":
            own = [other for other in traces[name] if other["pid"] == row["pid"]]
            passed = [end(other) for other in own if other["cat"] == "backward"]
            assert passed
            assert max(passed) <= row["ts"] + 1e-3
            assert all(end(row) <= other["ts"] + 1e-3 for other in own if other["cat"] == "optimizer")


@pytest.mark.parametrize(
    ("decision_every", "num_steps", "traced"), [(5, 10, [NUM_WARMUP_STEPS]), (2, 10, [1]), (1, 10, [0]), (9, 2, [1])]
)
def test_the_third_step_of_a_plan_is_traced_or_the_last_before_it_may_end(
    decision_every: int, num_steps: int, traced: list[int]
) -> None:
    entry, timeline = PlanRecord(PIPE_TO_DATA[0], 0, ""), Timeline(num_steps, 1, num_steps, num_steps, decision_every)
    due = []
    for step in range(num_steps):
        if is_due(entry, step, timeline):
            due.append(step)
            entry.traced_step = step
        entry.step_seconds.append(1.0)
    assert due == traced


RUN = (*TINY, "freeze=schedule", "freeze.num_frozen=[1]")


def test_a_run_writes_a_trace_of_each_plan_names_them_and_trains_as_without(pool: Pool, tmp_path: Path) -> None:
    plain = run_job(pool, 2, tmp_path / "plain", *RUN, made_up_times=True)
    job = run_job(pool, 2, tmp_path / "run", *RUN, "trace=true", made_up_times=True)
    files = ["trace_0.json", "trace_1.json"]
    assert len(job.summary["plans"]) == len(files)
    assert job.summary["traces"] == sorted(file.name for file in job.folder.glob("trace*")) == files
    assert {row["pid"] for file in files for row in spans(job.folder / file)} == {0, 1}
    assert "trace_0.json, trace_1.json" in dict(summary_rows(job.summary))["traces"]
    assert "traces" not in plain.summary
    assert not list(plain.folder.glob("trace*"))
    assert job.losses == plain.losses


def drawn(plan: Plan, *notes: Notes) -> list[tuple[str, float, float, int]]:
    """Name, start, end and rank of each event."""
    return [(event.name, event.start_s, event.end_s, event.rank) for event in measured_events(plan, notes)]


def of_rank(node: int, start_s: float, *spans: tuple[str, int, float, float]) -> Notes:
    """Spans of micro-batch 0 from kind, stage, start and end."""
    own = [Span(kind, stage, 0, start_s + begin, start_s + end) for kind, stage, begin, end in spans]
    return Notes(node, start_s, own)


def test_a_run_that_goes_back_keeps_no_trace_of_a_plan_that_it_has_no_more(tmp_path: Path) -> None:
    history = RunHistory(num_blocks=2, may_cache=False)
    for step in range(2):
        history.plan(PlanRecord(Plan(0, 0, ((0, 3),), 1, 1), step, ""))
    for number in (0, 1, 2, 10):
        (tmp_path / f"trace_{number}.json").write_text("{}")
    tracer = Tracer(tmp_path, Recorder(torch.device("cpu")), Timeline(8, 4, 2, 4, 1), history)
    with mock.patch("torch.distributed.get_rank", return_value=0):
        tracer.go_back()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace_0.json", "trace_1.json"]


def test_the_clocks_of_machines_are_set_by_the_barrier_and_a_transfer_lasts_until_it_is_used() -> None:
    below = of_rank(0, 100.0, ("forward", 0, 1, 2), ("backward", 0, 8, 10), ("optimizer", 0, 11, 12))
    above = of_rank(1, 7000.0, ("forward", 1, 3, 4), ("backward", 1, 4, 6), ("optimizer", 0, 11, 13))
    assert drawn(TWO_STAGES, below, above) == [
        ("F0", 1, 2, 0),
        ("send F0", 2, 3, 0),
        ("F0", 3, 4, 1),
        ("B0", 4, 6, 1),
        ("send B0", 6, 8, 1),
        ("B0", 8, 10, 0),
        ("optimizer", 11, 12, 0),
        ("optimizer", 11, 13, 1),
    ]


def test_ranks_of_one_machine_share_its_clock() -> None:
    below = of_rank(0, 100.0, ("forward", 0, 1, 2))
    late = Notes(0, 100.5, [Span("forward", 1, 0, 103.0, 104.0)])
    assert [event for event in drawn(TWO_STAGES, below, late) if event[3] == 1] == [("F0", 3, 4, 1)]


def test_a_transfer_to_a_busy_device_is_drawn_from_when_that_is_free() -> None:
    plan = Plan(0, 0, ((0, 1), (2, 3)), 1, 2)
    below = Notes(0, 0.0, [Span("forward", 0, 0, 0, 1), Span("forward", 0, 1, 1, 2)])
    above = Notes(0, 0.0, [Span("forward", 1, 0, 2, 5), Span("forward", 1, 1, 6, 9)])
    sends = [event for event in drawn(plan, below, above) if event[0].startswith("send")]
    assert sends == [("send F0", 1, 2, 0), ("send F1", 5, 6, 0)]


def test_a_gradient_is_sent_after_the_all_reduce_of_its_stage() -> None:
    plan = Plan(0, 0, ((0, 1), (2, 3)), 2, 1)
    below = of_rank(0, 0.0, ("forward", 0, 0, 1), ("backward", 0, 7, 8), ("all-reduce", 0, 8, 9))
    above = of_rank(0, 0.0, ("forward", 1, 2, 3), ("backward", 1, 3, 4), ("all-reduce", 1, 4, 6))
    events = drawn(plan, below, above, below, above)
    assert [event for event in events if event[3] == 1] == [
        ("F0", 2, 3, 1),
        ("B0", 3, 4, 1),
        ("all-reduce", 4, 6, 1),
        ("send B0", 6, 7, 1),
    ]
    assert [event[:3] for event in events if event[3] == 3] == [event[:3] for event in events if event[3] == 1]


def test_a_stage_without_active_layers_has_no_backward_pass_and_gets_no_gradient() -> None:
    plan = Plan(1, 0, ((0, 1), (2, 3)), 1, 1)
    below = of_rank(0, 0.0, ("forward", 0, 0, 1), ("backward", 0, 5, 5.1))
    above = of_rank(0, 0.0, ("forward", 1, 2, 3), ("backward", 1, 3, 4))
    assert [event[0] for event in drawn(plan, below, above)] == ["F0", "send F0", "F0", "B0"]


def test_passes_of_devices_with_several_stages_name_theirs() -> None:
    plan = Plan(0, 0, ((0, 0), (1, 1), (2, 2), (3, 3)), 1, 1, "interleaved1f1b", stages_per_rank=2)
    even = of_rank(0, 0.0, ("forward", 0, 0, 1), ("forward", 2, 4, 5))
    odd = of_rank(0, 0.0, ("forward", 1, 2, 3), ("forward", 3, 6, 7))
    assert [event[0] for event in drawn(plan, even, odd)] == [
        "F0 stage 0",
        "send F0 stage 0",
        "F0 stage 1",
        "send F0 stage 1",
        "F0 stage 2",
        "send F0 stage 2",
        "F0 stage 3",
    ]


def test_a_device_that_waits_for_nobody_leaves_no_gap_to_draw() -> None:
    between_machines = of_rank(0, 0.0, ("forward", 0, 0, 2.0)), of_rank(1, 0.0, ("forward", 1, 1.9, 3.0))
    events = measured_events(TWO_STAGES, between_machines)
    assert Event("send F0", 1.9, 0.0, 0, "transfer") in events, "clocks that differ make no negative times"

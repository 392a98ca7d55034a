from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from pipetransformer.autopipe.memory import Load, at
from pipetransformer.autopipe.plan import Layout
from pipetransformer.autopipe.schedules import INTERLEAVED, SCHEDULES, Moment, Pass


def drawn(layout: Layout) -> list[str]:
    """Each device's passes; the stage is named where a device has several."""
    many = layout.stages_per_rank > 1
    return [
        " ".join(
            ("F" if one.is_forward else "B") + (f"{one.stage}." if many else "") + str(one.microbatch)
            for one in SCHEDULES[layout.schedule].order(layout, device)
        )
        for device in range(layout.pipeline_size)
    ]


def pipeline(num_stages: int, num_microbatches: int, schedule: str, stages_per_rank: int = 1) -> Layout:
    return Layout(num_stages, 1, num_microbatches, schedule, stages_per_rank)


def test_gpipe_runs_all_forward_passes_first() -> None:
    assert drawn(pipeline(2, 3, "gpipe")) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_alternates_after_a_lead() -> None:
    assert drawn(pipeline(3, 4, "1f1b")) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved_takes_turns_between_the_stages_of_a_device() -> None:
    assert drawn(pipeline(4, 4, "interleaved1f1b", stages_per_rank=2)) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_every_microbatch_passes_once_each_way(schedule: str, num_microbatches: int) -> None:
    for device in range(4):
        passes = SCHEDULES[schedule].order(pipeline(4, num_microbatches, schedule), device)
        assert len(set(passes)) == len(passes) == 2 * num_microbatches


@pytest.mark.parametrize(
    ("pipeline_size", "stages_per_rank", "num_microbatches"), [(2, 2, 4), (3, 2, 6), (4, 3, 8), (4, 2, 3), (3, 1, 6)]
)
def test_interleaved_passes_in_torchs_order(pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> None:
    layout = Layout(pipeline_size * stages_per_rank, 1, num_microbatches, "interleaved1f1b", stages_per_rank)
    for device in range(pipeline_size):
        actions = torch_actions(device, pipeline_size, stages_per_rank, num_microbatches)
        kinds = [action.computation_type.name == "FORWARD" for action in actions]
        assert INTERLEAVED.order(layout, device) == [
            Pass(is_forward, action.stage_index, action.microbatch_index)
            for is_forward, action in zip(kinds, actions, strict=True)
        ]


def layouts() -> Iterator[Layout]:
    for name, size, per_rank, count in product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12)):
        layout = Layout(size * per_rank, 1, count, name, per_rank)
        if SCHEDULES[name].accepts(layout):
            yield layout


numbers = st.sampled_from((0.0, 1.0, 2.0, 5.0, 9.0))
loads = st.builds(Load, numbers, numbers, numbers, numbers, numbers)


@given(layout=st.sampled_from([*layouts()]), data=st.data())
def test_the_moments_of_a_device_hold_its_worst(layout: Layout, data: st.DataObject) -> None:
    """Whatever its stages weigh; after all passes it has every gradient."""
    schedule, device = SCHEDULES[layout.schedule], data.draw(st.integers(0, layout.pipeline_size - 1))
    own = data.draw(st.lists(loads, min_size=layout.stages_per_rank, max_size=layout.stages_per_rank))
    met, counts, made = [], [0] * len(own), [False] * len(own)
    for one in schedule.order(layout, device):
        stage = (one.stage - device) // layout.pipeline_size
        if not one.is_forward:
            met.append(Moment(tuple(counts), tuple(made), stage))
            made[stage] = True
        counts[stage] += 1 if one.is_forward else -1
    moments, after = schedule.moments(device, layout), sum(load.gradients for load in own)
    assert set(moments) <= set(met)
    assert max(after, *(at(each, own) for each in moments)) == max(after, *(at(each, own) for each in met))
    for has_gradients in (False, True):  # of which a lower bound counts on every device
        found = (min(each.in_flight) for each in met if not has_gradients or all(each.has_gradients))
        assert schedule.least_in_flight(layout, has_gradients) <= max(found, default=0)


def torch_actions(device: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> list[Any]:
    schedule: Any = object.__new__(ScheduleInterleaved1F1B)
    schedule.n_local_stages, schedule.pp_group_size, schedule._n_microbatches = (
        stages_per_rank,
        pipeline_size,
        num_microbatches,
    )
    schedule.microbatches_per_round = num_microbatches // max(1, num_microbatches // pipeline_size)
    return [action for action in schedule._calculate_single_rank_operations(device) if action is not None]


@pytest.mark.parametrize(
    ("num_microbatches", "runs"), [(1, True), (3, True), (4, True), (10, True), (9, False), (8, True)]
)
def test_rounds_are_equally_long(num_microbatches: int, runs: bool) -> None:
    assert INTERLEAVED.accepts(Layout(4, 1, num_microbatches)) == runs

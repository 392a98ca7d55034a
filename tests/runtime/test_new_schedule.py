"""A further pipeline schedule is one class and one row: it is planned, counted, simulated and run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cases import MEASURED_WIDTH, Case
from support.exactness import assert_equal
from support.looped_bfs import LoopedBFS, looped_bfs, with_looped_bfs
from support.memory_use import predicted_and_measured
from support.plans import HEAD
from support.pool import Pool
from support.trainings import then, train_elastic, train_reference
from torch.distributed.pipelining import ScheduleLoopedBFS

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.autopipe.schedules import Pass
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.simulate.step import step_events

SECOND = AffineTime(0.0, 1.0)
PROFILE = Profile((LayerProfile("block", SECOND, SECOND, SECOND, 0.0, 1000, 7, 3),) * 8, optimizer_state_factor=2)
DEVICES = Cluster(2, None, Link(0.0, 1e9))


@pytest.fixture(autouse=True)
def schedule() -> Iterator[None]:
    with looped_bfs():
        yield


def plan(num_frozen: int = 0) -> Plan:
    return Plan(num_frozen, 0, ((0, 1), (2, 3), (4, 5), (6, HEAD)), 1, 4, "looped_bfs", stages_per_rank=2)


@pytest.mark.parametrize("stages_per_rank", [None, 2])
def test_the_search_plans_with_it(stages_per_rank: int | None) -> None:
    constraints = PlanConstraints(4, 1, 4, "looped_bfs", stages_per_rank=stages_per_rank)
    found = best_plan(PROFILE, DEVICES, batch_size=4, constraints=constraints)
    assert (found.schedule, found.num_stages, found.stages_per_rank) == ("looped_bfs", 4, 2)
    assert found.stages == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found.predicted_step_s == step_seconds(PROFILE, DEVICES, found, batch_size=4)


def test_a_simulated_device_passes_in_torchs_order() -> None:
    torchs: Any = object.__new__(ScheduleLoopedBFS)
    torchs._stages, torchs.pp_group_size, torchs._n_microbatches = [None] * 2, 2, 4
    for device in range(2):
        actions = [action for action in torchs._calculate_single_rank_operations(device) if action is not None]
        assert LoopedBFS().order(plan(), device) == [
            Pass(action.computation_type.name == "FORWARD", action.stage_index, action.microbatch_index)
            for action in actions
        ]
    events = [event for event in step_events(PROFILE, DEVICES, plan(), 4) if event.category in ("forward", "backward")]
    assert len(events) == 4 * 4 * 2, "of four stages, four micro-batches, both ways"


def test_a_rank_takes_the_memory_that_the_planner_counts(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    """All micro-batches are in flight before there is a gradient."""
    case = Case("vit", bert_config, num_samples=128, batch_size=64, width=MEASURED_WIDTH)
    for predicted, measured in pool.run(2, with_looped_bfs, predicted_and_measured, case, plan(), str(tmp_path)):
        assert 0.9 * predicted <= measured <= predicted


@pytest.mark.parametrize("num_frozen", [0, 3])
def test_it_trains_as_one_process_does(num_frozen: int, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("bert", bert_config, dropout=0.2, num_steps=3)
    plans = then(plan(num_frozen))
    trace = pool.run(2, with_looped_bfs, train_elastic, case, plans, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {1: num_frozen}))

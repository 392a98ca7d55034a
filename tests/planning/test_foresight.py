"""The estimate of a run before its first step is what the same run takes at the predicted times."""

from dataclasses import replace

import pytest
from planning.test_planner import BATCH_SIZE, MIB, planner
from support.resumes import FreezeAndUnfreeze

from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.errors import InfeasiblePlan, UserError
from pipetransformer.freeze.base import FreezePolicy
from pipetransformer.freeze.egeria import Egeria
from pipetransformer.freeze.none import NoFreezing
from pipetransformer.freeze.pipetransformer import PaperRule
from pipetransformer.freeze.schedule import FixedSchedule
from pipetransformer.planning.foresight import Foresight
from pipetransformer.planning.planner import Planner
from pipetransformer.planning.timeline import Timeline

LINE = Timeline(num_samples=160, batch_size=BATCH_SIZE, steps_per_epoch=10, num_steps=30, decision_every=10)


def foresight(policy: FreezePolicy, elastic: Planner | None = None, overhead_s: float = 0.0) -> Foresight:
    return Foresight(elastic or planner(memory_mib=115), LINE, policy, 6, may_cache=False, overhead_s=overhead_s)


def test_without_freezing_it_is_the_first_plan_to_the_end() -> None:
    elastic = planner(memory_mib=115)
    found = foresight(NoFreezing(), elastic).estimate(BATCH_SIZE)
    step_s = elastic.predict(elastic.initial())
    assert found["step_seconds"] == step_s
    assert (found["epoch_seconds"], found["train_seconds"]) == (10 * step_s, 30 * step_s)
    assert (found["train_seconds_frozen"], found["num_frozen"]) == (None, None)
    assert found["device_bytes"] == list(device_memory_bytes(elastic.profile, elastic.initial(), BATCH_SIZE))
    assert max(found["device_bytes"]) <= found["device_budget"] == 115 * MIB


def test_with_freezing_it_is_the_sum_of_its_plans_and_transitions() -> None:
    elastic = planner(memory_mib=115)
    setting = foresight(FixedSchedule(num_frozen=[2, 4]), elastic, overhead_s=1.5)
    found, entries = setting.estimate(BATCH_SIZE), setting.history().entries
    assert [(entry.step, entry.plan.num_frozen) for entry in entries] == [(0, 0), (10, 2), (20, 4)]
    steps_s = sum(10 * elastic.predict(entry.plan) for entry in entries)
    moving_s = sum(entry.transition_seconds for entry in entries)
    assert moving_s >= 1.5, "a plan that changes takes the overhead"
    assert found["train_seconds_frozen"] == pytest.approx(steps_s + moving_s)
    assert found["train_seconds_frozen"] < found["train_seconds"]


def test_the_papers_rule_freezes_as_its_cap_allows() -> None:
    assert foresight(PaperRule(alpha=0.5)).estimate(BATCH_SIZE)["num_frozen"] == 5  # 6 blocks: 3, then 4.5


def test_what_is_frozen_from_the_start_counts_from_the_first_step() -> None:
    entries = foresight(FixedSchedule(num_frozen=[3], at_start=3)).history().entries
    assert [(entry.step, entry.plan.num_frozen, entry.num_samples) for entry in entries] == [(0, 0, 0), (0, 3, 480)]


def test_a_later_plan_that_fits_nothing_leaves_the_rest_of_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise InfeasiblePlan("nothing fits")

    setting = foresight(PaperRule())
    monkeypatch.setattr(type(setting.planner), "transition", refuse)
    found = setting.estimate(BATCH_SIZE)
    assert found["train_seconds"] > 0
    assert found["train_seconds_frozen"] is None


def test_a_policy_that_unfreezes_is_foreseen_with_the_most_that_it_freezes() -> None:
    """Its plans are those of the run: the cache is filled again at the lower level, which takes its time."""
    setting = replace(foresight(FreezeAndUnfreeze(prefixes=[6, 2])), may_cache=True)
    entries = setting.history().entries
    assert [(entry.plan.num_frozen, entry.plan.cache_level) for entry in entries] == [(0, 0), (6, 6), (2, 2)]
    assert entries[2].transition_seconds > 0
    assert setting.estimate(BATCH_SIZE)["num_frozen"] == 6


def test_a_policy_that_unfreezes_by_the_rate_sees_that_of_the_run() -> None:
    often, policy = replace(LINE, decision_every=2), Egeria(window=2, patience=1, rate_drop=0.1)
    setting = replace(foresight(policy), timeline=often, rate=lambda step, _: 1 - step / 30)
    assert [(entry.step, entry.plan.num_frozen) for entry in setting.history().entries] == [(0, 0), (6, 6), (28, 0)]


@pytest.mark.parametrize("prefix", [7, -1])
def test_a_decision_of_no_block_of_the_model_is_told_with_its_policy(prefix: int) -> None:
    with pytest.raises(
        UserError, match=rf"^at freeze decision 0 FreezeAndUnfreeze\.decide returned num_frozen={prefix}"
    ):
        foresight(FreezeAndUnfreeze(prefixes=[prefix])).estimate(BATCH_SIZE)


def test_the_last_batch_of_an_epoch_may_be_smaller() -> None:
    short = replace(foresight(NoFreezing()), timeline=replace(LINE, num_samples=155))
    assert short.history().num_samples == 3 * 155


def test_a_run_that_must_cache_is_foreseen_with_its_cache_and_the_samples_that_it_fills() -> None:
    policy = FixedSchedule(num_frozen=[2, 4])
    free = replace(foresight(policy, overhead_s=1e6), may_cache=True, num_samples=lambda step: 4 * 160)
    levels = [[entry.plan.cache_level for entry in each.history().entries] for each in (free, bound(free))]
    assert levels == [[0, 0, 0], [0, 2, 4]]
    assert [entry.num_samples_left for entry in bound(free).history().entries] == [0, 640, 640]


def bound(setting: Foresight) -> Foresight:
    return replace(setting, must_cache=True)

"""Made-up runs whose figures can be told by hand: a layer takes 3 s per sample, a frozen one 1 s, a cached one 0."""

from dataclasses import replace

import pytest

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.config.sections import Parallel
from pipetransformer.mesh import StageMesh
from pipetransformer.planning.history import NUM_TIMED_STEPS, NUM_WARMUP_STEPS, PlanRecord, RunHistory, plan_dict
from pipetransformer.planning.planner import Planner

BATCH_SIZE = 8
NOTHING, SECOND = AffineTime(0.0, 0.0), AffineTime(0.0, 1.0)
UNCONSTRAINED = LayerProfile("free", NOTHING, NOTHING, NOTHING, 0.0, 0, 0, 0)
BLOCK = LayerProfile("block", SECOND, SECOND, SECOND, 0.0, 0, 0, 0)
SETTING = Cluster(1, None, Link(0.0, 1e12), device_name="here"), Parallel(), BATCH_SIZE
PLANNER = Planner(Profile((UNCONSTRAINED, BLOCK, BLOCK, UNCONSTRAINED), 0.0), *SETTING)
WHOLE = Plan(0, 0, ((0, 3),), 1, 1)
CACHED = Plan(1, 1, ((2, 3),), 1, 1)


def booked(*entries: tuple[PlanRecord, list[float]], may_cache: bool = True) -> dict[str, object]:
    history = RunHistory(num_blocks=2, may_cache=may_cache)
    for entry, step_seconds in entries:
        history.plan(entry)
        for seconds in step_seconds:
            history.step(BATCH_SIZE, seconds)
    return history.summary(PLANNER)


def test_a_run_that_never_freezes_is_its_own_static_run() -> None:
    summary = booked((PlanRecord(WHOLE, 0, "first"), [2.0] * 4))
    assert summary["speedup_vs_static"] == pytest.approx(1)
    assert summary["limit"] == pytest.approx(1)
    assert summary["share_of_limit"] == pytest.approx(1)
    assert (summary["train_seconds"], summary["optimizer_steps"], summary["samples_per_second"]) == (8.0, 4, 4.0)
    assert (summary["num_frozen"], summary["mean_frozen_fraction"]) == (0, 0)


def test_the_speed_up_counts_transitions_and_takes_the_static_step_from_the_first_plan() -> None:
    summary = booked((PlanRecord(WHOLE, 0, "first"), [2.0] * 4), (PlanRecord(CACHED, 4, "froze 1", 1.0), [1.0] * 4))
    assert summary["train_seconds"] == 13.0
    assert summary["speedup_vs_static"] == pytest.approx(8 * 2.0 / 13.0)


def test_where_no_step_was_made_before_the_first_freeze_the_static_step_follows_from_a_later_one() -> None:
    summary = booked((PlanRecord(WHOLE, 0, "first"), []), (PlanRecord(CACHED, 0, "froze 1", 1.0), [1.0] * 4))
    static_step_s = 1.0 * 6 / 2  # F + D + W twice, against F + W of the one block that is left
    assert summary["speedup_vs_static"] == pytest.approx(4 * static_step_s / 5.0)


def test_slow_first_steps_do_not_flatter_the_static_plan() -> None:
    summary = booked((PlanRecord(WHOLE, 0, "first"), [9.0, 5.0, 2.0, 2.0]))
    assert summary["speedup_vs_static"] == pytest.approx(4 * 2.0 / 18.0)


def test_a_plan_that_made_its_slow_first_steps_alone_does_not_flatter_it_either() -> None:
    """As of a run that goes on just before a freeze."""

    def summary_of(later: list[float]) -> dict[str, object]:
        return booked((PlanRecord(WHOLE, 0, "first"), [9.0]), (PlanRecord(CACHED, 1, "froze 1", 1.0), later))

    summary = summary_of([1.0] * 4)
    assert summary["speedup_vs_static"] == pytest.approx(5 * 3.0 / 14.0), "by the later plan, of a third of the work"
    summary = summary_of([1.0])
    assert summary["speedup_vs_static"] == pytest.approx(2 * 9.0 / 11.0), "there is no other"


@pytest.mark.parametrize(
    ("step_seconds", "typical_s"),
    [([9.0, 9.0, 5.0, 2.0], 2.0), ([9.0, 9.0, 5.0], 5.0), ([9.0], 9.0), ([], None)],
)
def test_the_traced_step_counts_only_where_no_other_is_typical(
    step_seconds: list[float], typical_s: float | None
) -> None:
    traced_step = min(2, len(step_seconds) - 1)
    assert (
        PlanRecord(
            WHOLE, 0, "", step_seconds=step_seconds, step_sizes=[1.0] * len(step_seconds), traced_step=traced_step
        ).typical_step_s
        == typical_s
    )


def test_the_traced_step_is_none_of_those_by_which_static_plans_are_timed() -> None:
    """It waits for the other ranks, and writes down what each of them does."""
    record = PlanRecord(WHOLE, 0, "first", traced_step=NUM_WARMUP_STEPS)
    (timed,) = booked((record, [9.0] * (NUM_WARMUP_STEPS + 1) + [2.0, 3.0, 4.0, 4.0, 5.0]))["static_plans"]
    assert (timed["median_step_s"], timed["num_steps"]) == (4.0, 5)
    assert timed["median_step_s"] == record.typical_step_s


def test_the_limit_is_the_work_without_freezing_over_the_work_left_and_the_filling() -> None:
    summary = booked((PlanRecord(WHOLE, 0, "first"), [2.0] * 2), (PlanRecord(CACHED, 2, "froze 1", 0.0, 16), [1.0] * 2))
    all_blocks, one_block = 6 * BATCH_SIZE, 2 * BATCH_SIZE  # F + D + W twice; F + W of the block above the prefix
    expected = 4 * all_blocks / (2 * all_blocks + 2 * one_block + 16)
    assert summary["limit"] == pytest.approx(expected)
    assert summary["share_of_limit"] == pytest.approx(4 * 2.0 / 6.0 / expected)


def test_the_parts_of_the_time_are_the_time() -> None:
    summary = booked((PlanRecord(WHOLE, 0, "first"), [50.0] * 2), (PlanRecord(CACHED, 2, "froze 1", 4.0), [15.0] * 3))
    whole_s, cached_s = 6.0 * BATCH_SIZE, 2.0 * BATCH_SIZE  # F + D + W of two blocks; F + W of the one that is left
    nonzero = {name: seconds for name, seconds in summary["time_parts"].items() if seconds}
    assert nonzero == pytest.approx(
        {"active": 2 * whole_s + 3 * cached_s, "transitions": 4.0, "unpredicted": 2 * 2.0 - 3 * 1.0}
    )
    assert sum(nonzero.values()) == pytest.approx(summary["train_seconds"])
    assert [plan["step_parts"]["active"] for plan in summary["plans"]] == [whole_s, cached_s]


def test_steps_of_longer_batches_count_for_what_they_are_longer() -> None:
    """Every step takes 50 s for the typical length; the batches of the first plan happen to be twice as long."""
    history = RunHistory(num_blocks=2, may_cache=True)
    for plan, size in ((WHOLE, 2.0), (replace(WHOLE, num_microbatches=2), 0.5)):
        history.plan(PlanRecord(plan, 0, ""))
        for _ in range(NUM_WARMUP_STEPS + NUM_TIMED_STEPS):
            history.step(BATCH_SIZE, 50.0 * size, size)
    summary = history.summary(PLANNER)
    assert [plan["median_step_s"] for plan in summary["plans"]] == [50.0, 50.0]
    assert [plan["median_step_s"] for plan in summary["static_plans"]] == [50.0, 50.0]
    assert summary["speedup_vs_static"] == pytest.approx(1)
    assert summary["time_parts"]["unpredicted"] == pytest.approx(8 * 2.5 * (50.0 - 6.0 * BATCH_SIZE))
    assert summary["train_seconds"] == 8 * 2.5 * 50.0


def test_a_history_of_an_earlier_release_has_typical_batches() -> None:
    history = RunHistory(num_blocks=2, may_cache=True)
    history.plan(PlanRecord(WHOLE, 0, ""))
    history.step(BATCH_SIZE, 3.0, 2.0)
    state = history.state_dict()
    assert state["entries"][0].pop("step_sizes") == [2.0]
    history.load_state_dict(state)
    assert history.entries[0].step_sizes == [1.0]


@pytest.mark.parametrize(
    ("num_devices", "name", "is_known"),
    [(1, None, True), (None, None, True), (2, None, False), (4, None, False), (1, "here", True), (1, "another", False)],
)
def test_only_steps_on_the_devices_that_the_run_has_are_a_baseline(
    num_devices: int | None, name: str | None, is_known: bool
) -> None:
    """A run that goes on with other devices would be compared with the steps of those that it had."""
    history = RunHistory(num_blocks=2, may_cache=True, baseline=True)
    history.plan(PlanRecord(WHOLE, 0, "first", num_devices=num_devices, device_name=name))
    for _ in range(NUM_WARMUP_STEPS + NUM_TIMED_STEPS):
        history.step(BATCH_SIZE, 5.0)
    again = RunHistory(num_blocks=2, may_cache=True, baseline=True)
    again.load_state_dict(history.state_dict())
    assert [len(each.static_steps(PLANNER)) for each in (history, again)] == [is_known] * 2
    assert len(again.timed(PLANNER)) == is_known, "seconds of other devices correct no prediction"
    assert again.untimed(PLANNER) == ([] if is_known else [PLANNER.static])
    assert again.summary(PLANNER)["speedup_is"] == ("measured" if is_known else "predicted")


@pytest.mark.parametrize("other", [replace(WHOLE, num_replicas=2), replace(WHOLE, mesh=StageMesh(tp=2))])
def test_steps_on_devices_that_a_resumed_run_no_longer_has_are_not_predicted(other: Plan) -> None:
    summary = booked((PlanRecord(other, 0, "first"), [9.0] * 4), (PlanRecord(WHOLE, 4, "resumed"), [48.0] * 4))
    assert [plan["step_parts"] is None for plan in summary["plans"]] == [True, False]
    assert summary["time_parts"]["unpredicted"] == pytest.approx(4 * 9.0)
    assert summary["speedup_vs_static"] == pytest.approx(8 * 48.0 / (4 * 57.0)), "the static step is the second plan's"


def test_a_run_that_goes_on_with_other_devices_is_compared_on_these_alone() -> None:
    """Four steps of 9 s on two devices are no loss or gain over steps on the one that it has now."""
    before = PlanRecord(replace(WHOLE, num_replicas=2), 0, "first", num_devices=2)
    summary = booked((before, [9.0] * 4), (PlanRecord(WHOLE, 4, "resumed", num_devices=1), [48.0] * 4))
    alone = booked((PlanRecord(WHOLE, 0, "first", num_devices=1), [48.0] * 4))
    for name in ("speedup_vs_static", "limit", "share_of_limit", "is_static"):
        assert summary[name] == alone[name], name
    assert (summary["speedup_vs_static"], summary["is_static"]) == (1, True)
    assert (summary["compared_steps"], summary["optimizer_steps"]) == (4, 8)
    assert summary["train_seconds"] == 4 * 57.0


def test_steps_of_another_device_are_no_work_of_the_one_that_the_run_has() -> None:
    """The profile is of the present device: what it says of a plan of the other one is about neither."""
    before = PlanRecord(WHOLE, 0, "first", transition_seconds=2.0, num_devices=1, device_name="another")
    summary = booked((before, [9.0] * 4), (PlanRecord(WHOLE, 4, "resumed", num_devices=1), [48.0] * 4))
    assert [plan["step_parts"] is None for plan in summary["plans"]] == [True, False]
    parts, work_s = summary["time_parts"], 4 * 6.0 * BATCH_SIZE
    assert (parts["active"], parts["transitions"]) == pytest.approx((work_s, 2.0))
    assert parts["unpredicted"] == pytest.approx(4 * 9.0 + 4 * 48.0 - work_s)


def test_steps_that_are_trained_again_are_none_of_the_transition_that_takes_them_back() -> None:
    back = PlanRecord(replace(WHOLE, num_microbatches=2), 2, "taken back", transition_seconds=7.0, lost_seconds=6.0)
    parts = booked((PlanRecord(WHOLE, 0, "first"), [50.0] * 2), (back, [50.0] * 2))["time_parts"]
    assert (parts["transitions"], parts["trained_again"]) == (1.0, 6.0)


@pytest.mark.parametrize(
    ("num_samples_left", "may_cache", "filled"), [(8, True, True), (8, False, False), (99, True, False)]
)
def test_a_cache_that_was_not_used_counts_where_it_would_have_paid(
    num_samples_left: int, may_cache: bool, filled: bool
) -> None:
    later = PlanRecord(replace(WHOLE, num_frozen=1), 2, "froze 1", 0.0, num_samples_left)
    summary = booked((PlanRecord(WHOLE, 0, "first"), [2.0] * 2), (later, [1.0] * 2), may_cache=may_cache)
    one_block, prefix = 2 * BATCH_SIZE, num_samples_left if filled else 2 * BATCH_SIZE
    assert summary["limit"] == pytest.approx(4 * 6 * BATCH_SIZE / (2 * 6 * BATCH_SIZE + 2 * one_block + prefix))


def test_a_limit_counts_what_is_filled_again_after_unfreezing_and_nothing_for_no_cache() -> None:
    loaded = replace(UNCONSTRAINED, forward=SECOND)  # an embedding that takes a second per sample
    planner = Planner(replace(PLANNER.profile, layers=(loaded, BLOCK, BLOCK, loaded)), *SETTING)
    history = RunHistory(num_blocks=2, may_cache=False)
    for entry in (
        PlanRecord(CACHED, 0, "", 0.0, 16),
        PlanRecord(WHOLE, 1, "", 0.0, 12),
        PlanRecord(CACHED, 2, "", 0.0, 8),
    ):
        history.plan(entry)
        history.step(BATCH_SIZE, 1.0)
    whole, one_block, head = 8 * BATCH_SIZE, 2 * BATCH_SIZE, BATCH_SIZE
    work = 2 * (one_block + head) + whole
    filled = 2 * (16 + 8)  # the embedding and a block, twice; none before the step without a cache
    expected = 3 * whole / (work + filled) / planner.static_efficiency()
    assert history.summary(planner)["limit"] == pytest.approx(expected)


def test_the_frozen_fraction_is_a_mean_over_the_samples_seen() -> None:
    summary = booked((PlanRecord(WHOLE, 0, "first"), [1.0]), (PlanRecord(CACHED, 1, "froze 1"), [1.0] * 3))
    assert summary["mean_frozen_fraction"] == pytest.approx(3 / 4 * 1 / 2)


def test_a_run_is_static_where_every_plan_is_the_best_one_that_never_freezes() -> None:
    pipeline = Plan(0, 0, ((0, 1), (2, 3)), 1, 1)
    plans = {(WHOLE,): True, (WHOLE, WHOLE): True, (WHOLE, CACHED): False, (pipeline,): False}
    for used, is_static in plans.items():
        entries = ((PlanRecord(plan, step, "next"), [1.0]) for step, plan in enumerate(used))
        assert booked(*entries)["is_static"] is is_static


def test_before_the_first_step_there_is_nothing_to_compare() -> None:
    summary = booked((PlanRecord(WHOLE, 0, "first"), []))
    assert [summary[name] for name in ("speedup_vs_static", "limit", "share_of_limit")] == [None] * 3
    assert summary["samples_per_second"] == 0.0


def test_an_entry_tells_its_plan_in_plain_values() -> None:
    entry = PlanRecord(CACHED, 4, "froze 1", 0.5)
    assert entry.as_dict() == plan_dict(CACHED) | {
        "step": 4, "transition_seconds": 0.5, "reason": "froze 1", "choice": "", "num_steps": 0, "median_step_s": None,
    }  # fmt: skip
    assert plan_dict(CACHED)["stages"] == [[2, 3]]

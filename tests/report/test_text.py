from typing import Any

import pytest

from pipetransformer.autopipe.breakdown import StepParts
from pipetransformer.report import summary_text, text

Events = list[tuple[str, dict[str, Any]]]


def first(events: Events, name: str) -> dict[str, Any]:
    return next(values for event, values in events if event == name)


def test_stages_are_named_by_their_first_and_last_layers() -> None:
    assert text.layers_per_stage({"stages": [[0, 3], [4, 4], [5, 7]]}) == "embedding-3 | 4 | 5-head"
    assert text.layers_per_stage({"stages": [[0, 0], [1, 6], [7, 7]]}) == "embedding | 1-6 | head"


def test_sizes_are_shown_as_equations(events: Events) -> None:
    rows = dict(text.start_rows(first(events, "start")))
    assert rows["steps"] == "8 steps per epoch x 3 epochs = 24 steps"
    assert rows["batch"] == "64 samples = 1 replica x 64, in 4 micro-batches of 16"
    assert rows["devices"] == "4 stages x 1 replica = 4 devices"
    assert rows["because"] == "one stage does not fit the memory"


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ({"lr": 2e-5, "lr_reached": 2e-5}, "up to 2e-05"),
        ({"lr": 2e-5}, "up to 2e-05"),
        ({"lr": 2e-5, "lr_reached": 4.8e-6}, "up to 4.8e-06 of 2e-05: the warm-up is longer than the run"),
    ],
    ids=["reached", "earlier release", "never reached"],
)
def test_the_rate_is_the_highest_that_the_run_reaches(events: Events, values: dict[str, float], row: str) -> None:
    start = first(events, "start") | values | {"lr_by_model": False}
    assert dict(text.start_rows(start))["rate"] == row
    assert f", learning rate {row};" in text.start_lines(start)[1]


def test_a_cache_that_pays_at_no_block_alone_is_left_to_the_transitions(events: Events) -> None:
    cache = {"bytes_by_tier": {"memory": 2**20}, "missing": 0, "break_even_level": None}
    rows = dict(text.start_rows(first(events, "start") | {"cache": cache}))
    assert "fit in 1 MiB of memory; reading alone pays at no block; each transition weighs" in rows["cache"]


def test_a_run_that_ends_within_an_epoch_shows_no_false_equation(events: Events) -> None:
    rows = dict(text.start_rows(first(events, "start") | {"num_steps": 20}))
    assert rows["steps"] == "20 steps = 2.5 epochs of 8 steps"


ESTIMATE = {
    "step_seconds": 0.4, "epoch_seconds": 3.2, "train_seconds": 9.6, "train_seconds_frozen": 5.0, "num_frozen": 4,
    "device_bytes": [2**20, 3 * 2**20], "device_budget": 2**22,
}  # fmt: skip


def test_time_and_memory_are_predicted_before_the_first_step(events: Events) -> None:
    start = first(events, "start") | {"estimate": ESTIMATE}
    rows = dict(text.start_rows(start))
    assert rows["predicted"] == (
        "400 ms per step, 3.2 s per epoch, 9.6 s in all, 5 s where up to 4 blocks freeze as early as they may, "
        "evaluations not counted"
    )
    assert rows["memory"] == "3 MiB of 4 MiB on the fullest device (predicted)"
    assert "predicted: 400 ms per step" in text.start_lines(start)[2]
    unlimited = start | {"estimate": ESTIMATE | {"train_seconds_frozen": None, "device_budget": None}}
    rows = dict(text.start_rows(unlimited))
    assert rows["predicted"] == "400 ms per step, 3.2 s per epoch, 9.6 s in all, evaluations not counted"
    assert rows["memory"] == "3 MiB on the fullest device (predicted)"


def test_the_summary_says_how_good_the_prediction_was(events: Events) -> None:
    summary = events[-1][1] | {"predicted_step_seconds": 600.0, "step_seconds": 720.0}
    assert dict(summary_text.summary_rows(summary))["training time"].endswith(
        "; its steps took 1.2 times what was predicted"
    )


def test_the_summary_says_where_the_time_went_the_largest_part_first(events: Events) -> None:
    summary = events[-1][1]
    row = dict(summary_text.summary_rows(summary))["went to"]
    assert row == "50% active layers, 25% waiting for stages, 2% transitions, 22% not predicted"
    faster = summary | {"time_parts": summary["time_parts"] | {"unpredicted": -74.3}}
    assert dict(summary_text.summary_rows(faster))["went to"].endswith(", 10% less than predicted")
    before_guard = {name: seconds for name, seconds in summary["time_parts"].items() if name != "trained_again"}
    assert dict(summary_text.summary_rows(summary | {"time_parts": before_guard}))["went to"] == row
    earlier = {name: value for name, value in summary.items() if name != "time_parts"}
    assert "went to" not in dict(summary_text.summary_rows(earlier))


def test_every_part_of_a_step_has_a_name() -> None:
    assert [*summary_text.TIME_PARTS] == [*StepParts._fields, "transitions", "trained_again"]


def test_devices_without_work_are_counted(events: Events) -> None:
    rows = dict(text.start_rows(first(events, "start") | {"world_size": 6}))
    assert rows["devices"] == "4 stages x 1 replica = 4 devices, 2 idle"


def test_one_epoch_is_no_epochs(events: Events) -> None:
    rows = dict(text.start_rows(first(events, "start") | {"epochs": 1, "num_steps": 8}))
    assert rows["steps"] == "8 steps per epoch x 1 epoch = 8 steps"


def test_a_decision_tells_what_froze_and_why_once(events: Events) -> None:
    line = "freeze at step 8: 0 -> 2 of 6 blocks (at most a third of the active blocks)"
    assert text.decision_line(first(events, "decision")) == line


def test_a_decision_that_changes_nothing_says_so(events: Events) -> None:
    decision = first(events, "decision") | {"num_frozen_before": 2}
    assert text.decision_line(decision).startswith("freeze at step 8: still 2 of 6 blocks (")


def test_a_decision_that_unfreezes_says_so(events: Events) -> None:
    decision = first(events, "decision") | {"num_frozen_before": 4}
    assert text.decision_line(decision).startswith("unfreeze at step 8: 4 -> 2 of 6 blocks (")


@pytest.mark.parametrize(
    ("level", "parks", "words"),
    [
        (2, True, ", optimizer state as it was at the freeze, the cache falls back to block 2: "),
        (0, False, ", optimizer state anew, nothing from the cache: "),
    ],
)
def test_a_transition_that_unfreezes_tells_of_optimizer_state_and_cache(
    level: int, parks: bool, words: str, events: Events
) -> None:
    transition = first(events, "transition")
    before = transition["after"] | {"num_frozen": 4, "cache_level": 4, "stages": [[5, 7]]}
    after = transition["after"] | {"cache_level": level}
    unfrozen = transition | {"before": before, "after": after, "parks": parks}
    assert text.transition_title(unfrozen).startswith("unfreeze at step 8: 4 -> 2 blocks, ")
    assert words in text.transition_line(unfrozen)
    rows = dict(text.transition_rows(unfrozen, world_size=4))
    assert rows["trains again"] == words.split(", ")[1]
    assert "trains again" not in dict(text.transition_rows(transition | {"parks": parks}, world_size=4))


def test_frozen_blocks_have_no_gradient_norm() -> None:
    assert text.gradient_norms([0.0, None, 0.1234, 12.0]) == ["-", "-", "0.12", "12"]


def test_signals_are_shown_as_long_as_a_block_trains() -> None:
    values = {"signals": {"plasticity": [0.0, 0.5]}, "signal_seconds": {"plasticity": 0.02}}
    assert list(text.signal_lines(values)) == ["plasticity: - 0.5", "measuring took: plasticity 20 ms"]
    assert list(text.signal_lines(values | {"signals": {"plasticity": [0.0, 0.0]}})) == []


def test_a_transition_shows_what_changes_of_the_plan(events: Events) -> None:
    transition = first(events, "transition")
    assert text.transition_title(transition) == "freeze at step 8: 0 -> 2 blocks, new arrangement"
    assert text.transition_changes(transition) == [
        ("arrangement", "4 stages x 1 replica", "2 stages x 2 replicas"),
        ("layers per stage", "embedding-1 | 2-3 | 4-5 | 6-head", "embedding-4 | 5-head"),
        ("micro-batches", "4", "2"),
    ]


def test_a_transition_within_the_same_arrangement_says_so(events: Events) -> None:
    transition = first(events, "transition")
    same = transition | {"before": transition["after"] | {"num_frozen": 1}}
    assert text.transition_title(same) == "freeze at step 8: 1 -> 2 blocks, arrangement kept"
    assert text.transition_changes(same) == []


def test_a_sharded_arrangement_is_called_so(events: Events) -> None:
    plan = first(events, "transition")["after"] | {"stages": [[0, 7]], "sharded": True}
    assert text.arrangement(plan) == "1 stage x 2 replicas, sharded"


def test_a_transition_tells_its_predicted_times_apart(events: Events) -> None:
    rows = dict(text.transition_rows(first(events, "transition") | {"fill_seconds": 61.0}, world_size=4))
    assert rows == {
        "step": "frozen blocks alone 400 ms -> 180 ms; new arrangement 180 ms -> 130 ms (predicted)",
        "worth it": "saves 800 ms until the end of the run, takes 710 ms (predicted)",
        "took": "1.9 s (group 110 ms, move 1.2 s, rebuild 600 ms, fill 1m01s)",
        "moved": "3 MiB in 5 moves: 4-6 from rank 1 to 0, 6 from rank 1 to 2, head from rank 3 to 2",
    }


def test_a_transition_that_only_fills_the_cache_names_the_cache(events: Events) -> None:
    transition = first(events, "transition")
    before = transition["before"] | {"stages": [[0, 7]], "predicted_step_s": 0.0432}
    after = before | {"num_frozen": 2, "cache_level": 2, "stages": [[3, 7]], "predicted_step_s": 0.027}
    cached = transition | {"before": before, "after": after, "predicted_gain_s": 0.871, "num_steps_left": 189}
    rows = dict(text.transition_rows(cached, world_size=1))
    assert rows["step"] == "frozen blocks alone 43 ms -> 32 ms; cache 32 ms -> 27 ms (predicted)"


@pytest.mark.parametrize("other", [{"mesh": "tp 4"}, {"stages_per_rank": 2}, {"chunk_bytes": 9}, {"sharded": True}])
def test_a_transition_to_another_division_of_the_stages_is_a_new_arrangement(
    other: dict[str, Any], events: Events
) -> None:
    transition = first(events, "transition")
    before = transition["after"] | {"num_frozen": 1, "mesh": "tp 2 x dp_shard 2", "stages_per_rank": 1}
    after = before | other | {"num_frozen": 2}
    rows = dict(text.transition_rows(transition | {"before": before, "after": after}, world_size=4))
    assert "; new arrangement " in rows["step"]
    assert (
        "; fewer layers "
        in dict(
            text.transition_rows(transition | {"before": before, "after": before | {"num_frozen": 2}}, world_size=4)
        )["step"]
    )


def test_devices_that_are_idle_while_a_static_plan_is_timed_are_no_choice(events: Events) -> None:
    transition = first(events, "transition") | {"reason": "fewer layers"}
    assert dict(text.transition_rows(transition, world_size=8))["idle"].startswith("4 of 8 devices: no plan with more")
    timed = transition | {"reason": "baseline: times the best static plan of another kind"}
    assert "idle" not in dict(text.transition_rows(timed, world_size=8))


def test_a_transition_without_a_gain_gives_the_planners_reason_and_moves_nothing(events: Events) -> None:
    kept = first(events, "transition") | {"predicted_gain_s": 0.0, "bytes_moved": 0, "choice": "no other is faster"}
    rows = dict(text.transition_rows(kept, world_size=4))
    assert rows["step"] == "400 ms -> 130 ms (predicted)"
    assert rows["choice"] == "no other is faster"
    assert {"worth it", "moved"}.isdisjoint(rows)


def test_small_parts_of_a_transitions_time_are_left_out(events: Events) -> None:
    short = first(events, "transition") | {"seconds": 0.144, "group_seconds": 63e-6, "fill_seconds": 0.117}
    short |= {"move_seconds": 91e-6, "rebuild_seconds": 0.0, "plan_seconds": 0.00539}
    assert dict(text.transition_rows(short, world_size=4))["took"] == "140 ms (fill 120 ms)"


def test_devices_that_a_transition_leaves_idle_are_counted(events: Events) -> None:
    rows = dict(text.transition_rows(first(events, "transition"), world_size=5))
    assert rows["idle"] == "1 of 5 devices: no plan with more devices is predicted to be faster"


def test_what_a_fill_is_about_to_take_is_one_line(events: Events) -> None:
    plan = first(events, "cache_plan")
    line = text.cache_plan_line(plan)
    assert line.startswith("cache: stores the output of block 4, 1 MiB of memory and 2 MiB of disk in features: ")
    assert line.endswith("512 samples in about 1.5 s, paid back after 1.2 passes over them")
    assert text.cache_plan_line(plan | {"passes": None, "folder": None}).endswith("reading is no faster")


def test_a_cache_fill_says_from_where_it_was_computed(events: Events) -> None:
    fill = first(events, "cache_fill")
    assert text.cache_fill_line(fill).startswith("cache at step 16: output of block 4 from the input: 512 samples")
    assert "block 4 from block 2 (cached):" in text.cache_fill_line(fill | {"from_level": 2})


def test_an_evaluation_gives_every_metric_and_the_number_of_samples(events: Events) -> None:
    line = "test at step 8: accuracy 0.58, f1 0.48 (1,000 samples in 700 ms)"
    assert text.evaluation_line(first(events, "evaluate")) == line


def test_the_summary_compares_with_the_static_plan_and_the_limit(events: Events) -> None:
    assert dict(summary_text.summary_rows(first(events, "summary"))) == {
        "status": "completed",
        "accuracy": "0.74 on test, 1,000 samples",
        "best": "accuracy 0.76 at step 16",
        "all metrics": "test/accuracy 0.74, test/f1 0.64",
        "training time": "12m23s: 24 steps, 412 samples/s",
        "went to": "50% active layers, 25% waiting for stages, 2% transitions, 22% not predicted",
        "frozen": "4 of 6 blocks at the end, 33% on average",
        "speed-up": "2.0 times the best static plan (predicted; baseline=true measures it)",
        "limit": ("2.4 times with the same freeze decisions, no communication and no waiting; 84% of it reached"),
        "cache": "16 MiB of memory, 95.0% hits; filled in 3.2 s, read for 300 ms, waited for 30 ms",
    }


def test_a_speed_up_over_timed_plans_says_what_they_took(events: Events) -> None:
    plan = {"stages": [[0, 7]], "num_replicas": 2, "num_microbatches": 1, "schedule": "1f1b", "sharded": False}
    timed = [plan | {"median_step_s": 0.044}, plan | {"num_replicas": 1, "median_step_s": 0.04}]
    rows = dict(summary_text.summary_rows(first(events, "summary") | {"speedup_is": "measured", "static_plans": timed}))
    assert rows["speed-up"] == (
        "2.0 times the best static plan (measured: 1 stage x 1 replica 40 ms, 1 stage x 2 replicas 44 ms per step)"
    )


def test_figures_of_a_part_of_the_run_say_so(events: Events) -> None:
    """A run that went on with other devices is compared on these."""
    summary = first(events, "summary")
    steps = summary["optimizer_steps"]
    whole = dict(summary_text.summary_rows(summary | {"compared_steps": steps}))
    assert whole == dict(summary_text.summary_rows(summary))
    part = dict(summary_text.summary_rows(summary | {"compared_steps": 7}))
    told = f"; it and the limit are of the 7 of its {steps:,} steps that the run took on its present devices"
    assert part["speed-up"] == whole["speed-up"] + told


def test_a_baseline_that_came_to_no_end_is_not_advised_again(events: Events) -> None:
    rows = dict(summary_text.summary_rows(first(events, "summary") | {"speedup_is": "predicted", "baseline": True}))
    assert rows["speed-up"] == (
        "2.0 times the best static plan (predicted: blocks froze, or the run ended, before static plans of all kinds "
        "were timed)"
    )


def test_a_plan_that_is_changed_without_a_freeze_says_why(events: Events) -> None:
    frozen = first(events, "transition")
    assert text.new_plan_line(frozen) is None
    same = frozen | {"before": frozen["before"] | {"num_frozen": frozen["after"]["num_frozen"]}, "reason": "it is slow"}
    assert text.new_plan_line(same) == f"new plan at step {frozen['step']}: it is slow"


def test_a_run_that_ends_with_its_best_metric_names_it_once(events: Events) -> None:
    summary = first(events, "summary")
    rows = dict(summary_text.summary_rows(summary | {"best": summary["best"] | {"value": summary["metric"]["value"]}}))
    assert "best" not in rows


def test_a_metric_of_earlier_weights_than_the_last_ones_names_their_step(events: Events) -> None:
    def shown(last: int, **model: Any) -> dict[str, str]:
        values = first(events, "summary") | {"last_step": last} | model
        return dict(summary_text.summary_rows(values | {"metric": values["metric"] | {"step": 16}}))

    scored = "0.74 on test, 1,000 samples"
    assert shown(24)["accuracy"] == f"{scored}, with the weights of step 16"
    rows = shown(24, model={"folder": "model", "step": 24})
    assert rows["accuracy"] == f"{scored}, with the weights of step 16, which are not the saved ones"
    assert rows["saved"] == "the weights of step 24"
    for last, saved in ((24, 16), (16, 16)):
        assert shown(last, model={"folder": "model", "step": saved})["accuracy"].startswith(scored)
        assert "not the saved ones" not in shown(last, model={"folder": "model", "step": saved})["accuracy"]


def test_a_run_that_was_the_best_static_plan_throughout_has_no_speed_up(events: Events) -> None:
    rows = dict(summary_text.summary_rows(first(events, "summary") | {"is_static": True}))
    assert {"speed-up", "limit"}.isdisjoint(rows)


def test_more_than_the_limit_is_explained(events: Events) -> None:
    rows = dict(summary_text.summary_rows(first(events, "summary") | {"share_of_limit": 1.1}))
    assert "110% of it reached: steps went faster than the layers did" in rows["limit"]


def test_the_summary_of_a_scaled_loss_counts_the_steps_that_changed_nothing(events: Events) -> None:
    summary = first(events, "summary") | {"loss_scale": 32768.0, "num_skipped_steps": 1}
    assert dict(summary_text.summary_rows(summary))["loss scale"] == "32,768 at the end, 1 step skipped for overflow"


def test_the_summary_names_input_that_steps_wait_for_and_none_that_is_ready(events: Events) -> None:
    summary = first(events, "summary") | {"step_seconds": 200.0}
    waiting = {"num_workers": 1, "wait_seconds": 50.0, "ready_fraction": 0.1}
    row = dict(summary_text.summary_rows(summary | {"input": waiting}))["input"]
    assert row == "steps waited for it for 25% of their time, with 1 worker per rank; raise loader.num_workers="
    assert "input" not in dict(summary_text.summary_rows(summary | {"input": waiting | {"wait_seconds": 9.0}}))


def test_the_summary_names_logs_that_the_training_waits_for() -> None:
    summary = {"status": "completed", "train_seconds": 200.0}
    row = dict(summary_text.summary_rows(summary | {"report_seconds": 5.0}))["logging"]
    assert row.startswith("the training waited for it for 2.5% of its time; logger=none writes the run folder alone, ")
    assert "logging" not in dict(summary_text.summary_rows(summary | {"report_seconds": 1.0}))
    short = {"status": "completed", "train_seconds": 10.0, "report_seconds": 0.5}
    assert "logging" not in dict(summary_text.summary_rows(short)), "half a second is nobody's concern"


@pytest.mark.parametrize(
    "known", [{}, {"metric": None, "metrics": {}, "speedup_vs_static": None, "limit": None, "share_of_limit": None}]
)
def test_the_summary_of_a_run_that_failed_early_shows_what_is_known(known: dict[str, Any]) -> None:
    rows = summary_text.summary_rows({"status": "failed", "error": "step 1: the loss is nan", **known})
    assert rows == [("status", "failed"), ("error", "step 1: the loss is nan")]


def test_a_plan_has_a_cell_for_each_column(events: Events) -> None:
    plan = first(events, "summary")["plans"][2] | {"median_step_s": 0.09}
    assert dict(zip(summary_text.PLAN_COLUMNS, summary_text.plan_row(plan), strict=True)) == {
        "from": "16",
        "frozen": "4",
        "cached": "4",
        "layers per stage": "5-head",
        "replicas": "4",
        "micro": "1",
        "predicted": "80 ms",
        "measured": "90 ms",
    }


def test_a_plan_fits_one_line(events: Events) -> None:
    plan = first(events, "summary")["plans"][1]
    words = "2 frozen, 0 cached, 2 stages x 2 replicas (embedding-4 | 5-head), 2 micro-batches"
    line = f"plan from step 8: {words}, 130 ms per step predicted"
    assert summary_text.plan_line(plan | {"median_step_s": None}) == line
    assert summary_text.plan_line(plan | {"median_step_s": 0.31}) == f"{line}, 310 ms measured"


def test_what_the_guard_did_is_shown_with_its_reason(events: Events) -> None:
    decision = first(events, "decision") | {
        "step": 120, "bound": "guard", "num_frozen_before": 4, "num_frozen": 2, "reason": "accuracy fell",
    }  # fmt: skip
    assert text.decision_line(decision) == "guard at step 120: accuracy fell (4 -> 2 of 6 blocks frozen)"
    guard = {"num_skipped": 1, "num_rollbacks": 2, "num_steps_lost": 90}
    rows = dict(summary_text.summary_rows(first(events, "summary") | {"guard": guard}))
    assert rows["guard"] == "1 bad step without an update; rolled back 2 times, 90 steps trained again"


def test_a_change_of_the_plan_alone_is_not_called_a_freeze(events: Events) -> None:
    values = next(values for event, values in events if event == "transition")
    same = values | {"after": values["after"] | {"num_frozen": values["before"]["num_frozen"]}}
    assert text.transition_title(values).startswith("freeze at step 8: 0 -> 2 blocks")
    assert text.transition_title(same) == "new plan at step 8: still 0 blocks, new arrangement"

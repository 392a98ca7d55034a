from typing import Any

import pytest

from pipetransformer.report import text

Events = list[tuple[str, dict[str, Any]]]


def first(events: Events, name: str) -> dict[str, Any]:
    return next(values for event, values in events if event == name)


def test_stages_are_named_by_their_first_and_last_layers() -> None:
    assert text.layers_per_stage({"stages": [[0, 3], [4, 4], [5, 7]]}) == "embedding-3 | 4 | 5-head"
    assert text.layers_per_stage({"stages": [[0, 0], [1, 6], [7, 7]]}) == "embedding | 1-6 | head"


def test_sizes_are_shown_as_equations(events: Events) -> None:
    rows = dict(text.start_rows(first(events, "start")))
    assert rows["steps"] == "8 steps/epoch x 3 epochs = 24 steps"
    assert rows["batch"] == "64 samples = 1 replica x 64, in 4 micro-batches of 16"
    assert rows["devices"] == "4 stages x 1 replica = 4 devices"
    assert rows["because"] == "one stage does not fit the memory"


def test_a_run_that_ends_within_an_epoch_shows_no_false_equation(events: Events) -> None:
    rows = dict(text.start_rows(first(events, "start") | {"num_steps": 20}))
    assert rows["steps"] == "20 steps = 2.5 epochs of 8 steps"


def test_devices_without_work_are_counted(events: Events) -> None:
    rows = dict(text.start_rows(first(events, "start") | {"world_size": 6}))
    assert rows["devices"] == "4 stages x 1 replica = 4 devices, 2 idle"


def test_a_decision_names_the_term_that_bound_and_all_numbers(events: Events) -> None:
    assert text.decision_line(first(events, "decision")) == (
        "decision at step 8: 0 -> 2 blocks frozen, bound by cap (cap 2.25, argmin 5): "
        "at most a third of the active blocks"
    )


def test_a_decision_that_changes_nothing_says_so(events: Events) -> None:
    decision = first(events, "decision") | {"num_frozen_before": 2, "terms": {}}
    assert text.decision_line(decision).startswith("decision at step 8: still 2 blocks frozen, bound by cap: ")


def test_frozen_blocks_have_no_gradient_norm() -> None:
    assert text.gradient_norms([0.0, None, 0.1234, 12.0]) == ["-", "-", "0.12", "12"]


def test_a_transition_shows_the_plan_before_and_after(events: Events) -> None:
    transition = first(events, "transition")
    assert text.transition_title(transition) == "transition at step 8: 4 stages x 1 replica -> 2 stages x 2 replicas"
    assert text.transition_changes(transition["before"], transition["after"]) == [
        ("frozen blocks", "0", "2"),
        ("read from cache", "nothing", "nothing"),
        ("layers per stage", "embedding-1 | 2-3 | 4-5 | 6-head", "embedding-4 | 5-head"),
        ("replicas", "1", "2"),
        ("micro-batches", "4", "2"),
        ("schedule", "1f1b", "1f1b"),
        ("predicted step", "400 ms", "133 ms"),
    ]


def test_a_transition_within_the_same_arrangement_says_so(events: Events) -> None:
    transition = first(events, "transition")
    same = transition | {"before": transition["after"]}
    assert text.transition_title(same) == "transition at step 8: still 2 stages x 2 replicas"


def test_a_sharded_arrangement_is_called_so(events: Events) -> None:
    plan = first(events, "transition")["after"] | {"stages": [[0, 7]], "sharded": True}
    assert text.arrangement(plan) == "1 stage x 2 replicas, sharded"


def test_a_transition_shows_what_moved_and_how_long_each_part_took(events: Events) -> None:
    rows = dict(text.transition_costs(first(events, "transition") | {"fill_seconds": 61.0}))
    assert rows == {
        "because": "2 more blocks frozen",
        "moved": "3 MiB in 5 moves",
        "took": "1.93 s (plan 20 ms, group 110 ms, move 1.2 s, rebuild 600 ms, fill 1m01s)",
        "gain": "steps 3 times as fast (predicted)",
        "choice": "24 steps of 0.3 s would take 0.2 s each: 2.4 s less, more than the 0.71 s of the transition",
    }


def test_a_cache_fill_says_from_where_it_was_computed(events: Events) -> None:
    fill = first(events, "cache_fill")
    assert text.cache_fill_line(fill).startswith("cache at step 16: output of block 4 from the input: 512 samples")
    assert "block 4 from block 2 (cached):" in text.cache_fill_line(fill | {"from_level": 2})


def test_an_evaluation_gives_every_metric_and_the_number_of_samples(events: Events) -> None:
    line = "test at step 8: accuracy 0.58, f1 0.48 (1,000 samples in 700 ms)"
    assert text.evaluation_line(first(events, "evaluate")) == line


def test_the_summary_compares_with_the_static_plan_and_the_limit(events: Events) -> None:
    assert dict(text.summary_rows(first(events, "summary"))) == {
        "status": "completed",
        "accuracy": "0.74 on test, 1,000 samples",
        "all metrics": "test/accuracy 0.74, test/f1 0.64",
        "training time": "12m23s: 24 steps, 412.3 samples/s",
        "frozen": "4 of 6 blocks at the end, 33.3% on average",
        "speed-up": "2.04 times the best static plan",
        "limit": "2.42 times with the same freeze decisions; 84.3% of it reached",
    }


def test_more_than_the_limit_is_explained(events: Events) -> None:
    rows = dict(text.summary_rows(first(events, "summary") | {"share_of_limit": 1.1}))
    assert "110.0% of it reached, for steps went faster than the layers did" in rows["limit"]


def test_the_summary_of_a_scaled_loss_counts_the_steps_that_changed_nothing(events: Events) -> None:
    summary = first(events, "summary") | {"loss_scale": 32768.0, "num_skipped_steps": 1}
    assert dict(text.summary_rows(summary))["loss scale"] == "32,768 at the end, 1 step skipped for overflow"


@pytest.mark.parametrize(
    "known", [{}, {"metric": None, "metrics": {}, "speedup_vs_static": None, "limit": None, "share_of_limit": None}]
)
def test_the_summary_of_a_run_that_failed_early_shows_what_is_known(known: dict[str, Any]) -> None:
    rows = text.summary_rows({"status": "failed", "error": "step 1: the loss is nan", **known})
    assert rows == [("status", "failed"), ("error", "step 1: the loss is nan")]


def test_a_plan_has_a_cell_for_each_column(events: Events) -> None:
    plan = first(events, "summary")["plans"][2] | {"median_step_s": 0.09}
    assert dict(zip(text.PLAN_COLUMNS, text.plan_row(plan), strict=True)) == {
        "from step": "16",
        "frozen": "4",
        "cached": "4",
        "layers per stage": "5-head",
        "replicas": "4",
        "micro-batches": "1",
        "predicted": "80 ms",
        "measured": "90 ms",
    }


def test_a_plan_fits_one_line(events: Events) -> None:
    plan = first(events, "summary")["plans"][1]
    words = "2 frozen, 0 cached, 2 stages x 2 replicas (embedding-4 | 5-head), 2 micro-batches, 133 ms per step"
    assert text.plan_line(plan) == f"plan from step 8: {words}"

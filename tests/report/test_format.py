from math import nan
from typing import Any

import pytest

from pipetransformer.report.format import BestMetric, Progress, byte_size, duration, number, plural, two_digits

Events = list[tuple[str, dict[str, Any]]]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.00000042, "0.00042 ms"),
        (0.0421, "42 ms"),
        (0.1444, "140 ms"),
        (0.9949, "990 ms"),
        (0.9951, "1 s"),
        (1.93, "1.9 s"),
        (12.34, "12 s"),
        (59.4, "59 s"),
        (59.6, "1m00s"),
        (743.2, "12m23s"),
        (3599.6, "1h00m"),
        (18440, "5h07m"),
    ],
)
def test_a_duration_has_two_digits_or_its_two_largest_units(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.774, "0.77"), (0.996, "1.0"), (1.601, "1.6"), (2, "2.0"), (9.96, "10"), (12.3, "12"), (143, "140"), (0, "0")],
)
def test_a_noisy_number_has_two_digits(value: float, words: str) -> None:
    assert two_digits(value) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (3_453_000, "3.29 MiB"),
        (3 * 2**20, "3 MiB"),
        (388 * 2**30, "388 GiB"),
        (2**42, "4 TiB"),
    ],
)
def test_a_byte_size_is_shown_in_binary_units(num_bytes: int, words: str) -> None:
    assert byte_size(num_bytes) == words


def test_a_number_that_is_not_known_is_a_dash() -> None:
    assert [number(None), number(0.123456), number(float("nan"))] == ["-", "0.1235", "nan"]


def test_counts_agree_with_their_nouns() -> None:
    assert [plural(1, "stage"), plural(2, "stage"), plural(1200, "micro-batch")] == [
        "1 stage",
        "2 stages",
        "1,200 micro-batches",
    ]


@pytest.fixture
def progress(events: Events) -> Progress:
    return Progress(events[1][1])


def step(step_seconds: float) -> dict[str, float]:
    return {"step_seconds": step_seconds}


def test_the_time_left_is_the_time_per_step_times_the_steps_left(progress: Progress) -> None:
    progress.step(step(2.0))
    assert progress.left(4) == "left 40 s"


def test_the_time_left_follows_the_recent_steps(progress: Progress) -> None:
    progress.step(step(100.0))
    for _ in range(200):
        progress.step(step(1.0))
    assert progress.left(14) == "left 10 s"


def test_the_time_left_starts_anew_after_a_transition(progress: Progress, events: Events) -> None:
    progress.step(step(100.0))
    progress.transition(next(values for event, values in events if event == "transition"))
    assert progress.left(14) == ""
    progress.step(step(1.0))
    assert progress.left(14) == "left 10 s"


def test_after_the_last_step_nothing_is_left(progress: Progress) -> None:
    progress.step(step(1.0))
    assert progress.left(24) == ""


def test_the_status_shows_the_plan_that_holds(progress: Progress, events: Events) -> None:
    steps = [values for event, values in events if event == "step"]
    assert progress.status(steps[0]) == ("epoch 0.12/3  loss 2.3  160 samples/s  0/6 frozen  4 stages x 1 replica")
    for event, values in events:
        if event == "transition":
            progress.transition(values)
    assert progress.status(steps[-1]).endswith("800 samples/s  4/6 frozen, 4 cached  1 stage x 4 replicas")


def evaluation(value: float, step: int = 8) -> dict[str, Any]:
    return {"split": "test", "metrics": {"accuracy": value, "f1": 0.1}, "step": step}


def test_the_status_shows_the_last_metric_and_the_best_one_where_that_was_earlier(
    progress: Progress, events: Events
) -> None:
    values = next(values for event, values in events if event == "step")
    assert [progress.evaluation(evaluation(value)) for value in (0.5, 0.75)] == [True, True]
    assert "  test accuracy 0.75  " in progress.status(values)
    assert not progress.evaluation(evaluation(0.625))
    assert "  test accuracy 0.625 (best 0.75)  " in progress.status(values)


def test_the_best_metric_is_kept_for_each_split() -> None:
    best = BestMetric()
    assert best.of("test") is None
    evaluations = [("test", nan), ("test", 0.5), ("dev", 0.9), ("test", 0.5), ("test", 0.4)]
    taken = [
        best.update(split, {"accuracy": value, "f1": 1 - value}, step)
        for step, (split, value) in enumerate(evaluations)
    ]
    assert taken == [True, True, True, False, False]
    assert best.of("test") == {"name": "accuracy", "value": 0.5, "split": "test", "step": 1}

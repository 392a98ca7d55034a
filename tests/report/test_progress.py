from typing import Any

import pytest

from pipetransformer.report.progress import Progress

Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def progress(events: Events) -> Progress:
    return Progress(events[0][1])


def step(step_seconds: float) -> dict[str, float]:
    return {"step_seconds": step_seconds}


def test_the_time_left_is_the_time_per_step_times_the_steps_left(progress: Progress) -> None:
    progress.step(step(2.0))
    assert progress.left(4) == "40 s"


def test_the_time_left_follows_the_recent_steps(progress: Progress) -> None:
    progress.step(step(100.0))
    for _ in range(200):
        progress.step(step(1.0))
    assert progress.left(14) == "10 s"


def test_the_time_left_starts_anew_after_a_transition(progress: Progress, events: Events) -> None:
    progress.step(step(100.0))
    progress.transition(next(values for event, values in events if event == "transition"))
    assert progress.left(14) == "-"
    progress.step(step(1.0))
    assert progress.left(14) == "10 s"


def test_epochs_end_where_the_start_event_says(progress: Progress) -> None:
    assert [number for number in range(1, 25) if progress.ends_epoch(number)] == [8, 16, 24]


def test_the_last_step_ends_an_epoch_that_is_cut_short(events: Events) -> None:
    assert Progress(events[0][1] | {"num_steps": 20}).ends_epoch(20)


def test_the_status_shows_the_plan_that_holds(progress: Progress, events: Events) -> None:
    steps = [values for event, values in events if event == "step"]
    assert progress.status(steps[0]) == ("epoch 0.12/3  loss 2.3  160 samples/s  0/6 frozen  4 stages x 1 replica")
    for event, values in events:
        if event == "transition":
            progress.transition(values)
    assert progress.status(steps[-1]).endswith("800 samples/s  4/6 frozen, 4 cached  1 stage x 4 replicas")

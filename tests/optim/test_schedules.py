"""Rates against transformers' and torch's own schedulers, at every step."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR
from transformers import get_scheduler

from pipetransformer.optim.base import SGD

STEPS, WARMUP, LR = 50, 7, 0.3


def theirs(name: str, num_warmup: int, **options: Any) -> list[float]:
    """Rates of steps 0 to the last; transformers' first step has the rate 0, which ours leaves out."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = get_scheduler(name, optimizer, num_warmup, STEPS, scheduler_specific_kwargs=options)
    rates = []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def ours(num_warmup: int, **options: Any) -> list[float]:
    spec = SGD(lr=LR, warmup_steps=num_warmup, **options)
    return [spec.rate(step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("num_warmup", [0, WARMUP])
@pytest.mark.parametrize(
    ("name", "their_options", "options"),
    [
        ("linear", {}, {"schedule": "linear"}),
        ("cosine", {}, {"schedule": "cosine"}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"schedule": "cosine", "final_fraction": 0.1}),
        ("polynomial", {"power": 1.0, "lr_end": 0.03}, {"schedule": "linear", "final_fraction": 0.1}),
        ("polynomial", {"power": 2.0, "lr_end": 0.03}, {"schedule": "polynomial", "power": 2.0, "final_fraction": 0.1}),
        ("constant_with_warmup", {}, {"schedule": "constant"}),
        ("inverse_sqrt", {}, {"schedule": "inverse_sqrt"}),
    ],
)
def test_a_rate_is_that_of_transformers(
    name: str, their_options: dict[str, Any], options: dict[str, Any], num_warmup: int
) -> None:
    expected, found = theirs(name, num_warmup, **their_options), ours(num_warmup, **options)
    assert found[num_warmup:] == pytest.approx(expected[num_warmup:], rel=1e-12)
    before = max(0, num_warmup - 1)
    assert found[:before] == pytest.approx(expected[1 : before + 1], rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "inverse_sqrt"])
@pytest.mark.parametrize("num_warmup", [0, WARMUP, STEPS, STEPS + 1, 4 * STEPS])
def test_the_highest_rate_is_that_of_some_step(schedule: str, num_warmup: int) -> None:
    found = SGD(lr=LR, warmup_steps=num_warmup, schedule=schedule).highest_rate(STEPS)
    assert found == pytest.approx(max(ours(num_warmup, schedule=schedule)), rel=1e-12)


def test_steps_down_are_those_of_torchs_multi_step_schedule() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = MultiStepLR(optimizer, [20, 35], gamma=0.5)
    expected = []
    for _ in range(STEPS):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert ours(0, schedule="step", milestones=[0.4, 0.7], gamma=0.5) == pytest.approx(expected, rel=1e-12)


def test_a_number_of_warm_up_steps_takes_the_place_of_the_fraction() -> None:
    assert SGD(lr=1.0, warmup=0.5, warmup_steps=2, schedule="constant").rate(0, 10) == 0.5
    assert SGD(lr=1.0, warmup=0.5, warmup_steps=0, schedule="constant").rate(0, 10) == 1.0

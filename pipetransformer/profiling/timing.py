"""Times functions on a device, robust against whatever else the machine does.

A disturbance only ever makes a call slower, so the faster half of the repeats tells what a call takes. Where even that
half differs much, more repeats are made.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")

FEWEST, MOST = 3, 15  # repeats of a measurement on one rank
LARGE_SPREAD, ENOUGH_S = 0.1, 0.5  # no repeats are added after so many seconds


def timed(function: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Returns the seconds of one call, until the device has finished it, and its result."""
    _synchronize(device)
    start = time.perf_counter()
    result = function()
    _synchronize(device)
    return time.perf_counter() - start, result


def typical(seconds: Sequence[float]) -> float:
    """Returns the median of the faster half of repeats."""
    return statistics.median(_faster_half(seconds))


def spread(seconds: Sequence[float]) -> float:
    """Returns how much slower than the fastest one the faster half of repeats is at most, as a fraction of it."""
    half = _faster_half(seconds)
    return half[-1] / half[0] - 1 if half[0] else 0.0


def _faster_half(seconds: Sequence[float]) -> list[float]:
    return sorted(seconds)[: (len(seconds) + 1) // 2]


def until_settled(measure: Callable[[], Result], seconds: Callable[[Result], float]) -> list[Result]:
    """Repeats a measurement until its spread is small, or it has taken long. For calls without collectives.

    Args:
        measure: Measures once.
        seconds: Returns the seconds that a measurement took.
    """
    measured = [measure() for _ in range(FEWEST)]
    while len(measured) < MOST:
        taken = [seconds(each) for each in measured]
        if spread(taken) <= LARGE_SPREAD or sum(taken) > ENOUGH_S:
            break
        measured.append(measure())
    return measured


def typical_seconds(
    function: Callable[[], object], device: torch.device, num_repeats: int, before: Callable[[], object] | None = None
) -> float:
    """Returns the typical seconds of several calls, after one that is not counted: the first one opens connections.

    Args:
        function: What is timed.
        device: What it runs on.
        num_repeats: Calls that count.
        before: Runs before each of them, and is not timed.
    """
    function()
    seconds = list[float]()
    for _ in range(num_repeats):
        if before is not None:
            before()
        seconds.append(timed(function, device)[0])
    return typical(seconds)


def added_seconds(
    plain: Callable[[], object], more: Callable[[], object], meet: Callable[[], object], num_rounds: int,
    device: torch.device,
) -> float:  # fmt: skip
    """Returns the seconds that a call takes more than another, each timed once in a round.

    Layers are counted by their typical seconds, so that what a round takes more than those is what was added.

    Args:
        plain: The call without it.
        more: The call with it, which waits for other ranks.
        meet: Waits until they have come as far.
    """
    without_s, with_s = list[float](), list[float]()
    for _ in range(num_rounds):
        without_s.append(timed(plain, device)[0])
        meet()
        with_s.append(timed(more, device)[0])
    return statistics.median(with_s) - typical(without_s)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

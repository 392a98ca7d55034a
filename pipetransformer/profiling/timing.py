"""Times functions on a device."""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def timed(function: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Returns the seconds of one call, until the device has finished it, and its result."""
    _synchronize(device)
    start = time.perf_counter()
    result = function()
    _synchronize(device)
    return time.perf_counter() - start, result


def median_seconds(function: Callable[[], object], device: torch.device, num_repeats: int) -> float:
    """Returns the median of several calls, after one that is not counted: the first one opens connections."""
    function()
    return statistics.median(timed(function, device)[0] for _ in range(num_repeats))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

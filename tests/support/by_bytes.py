"""A pool whose runs plan by bytes alone, for tests of what a run trains and not of what it measures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.jobs import with_made_up_times
from support.pool import Pool


class PoolByBytes(Pool):
    """Has the workers of another pool call functions with made-up times.

    Attributes:
        measuring: The other pool.
    """

    def __init__(self, measuring: Pool) -> None:
        super().__init__(Path())
        self.measuring = measuring

    def run(self, world: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
        return self.measuring.run(world, _by_bytes, function, *args, backend=backend)


def _by_bytes(function: Callable[..., Any], *args: Any) -> Any:
    with with_made_up_times():
        return function(*args)

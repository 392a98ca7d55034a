"""Tests of measurements take times as often as a run does."""

from collections.abc import Iterator

import pytest
from support.pool import Pool


@pytest.fixture(autouse=True)
def measured_as_in_a_run(pool: Pool) -> Iterator[None]:
    """Has the ranks take each time as often as a run does."""
    pool.measures_briefly = False
    yield
    pool.measures_briefly = True

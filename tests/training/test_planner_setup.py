"""All ranks of a run plan by the same numbers, whatever each of them measures and stores."""

from pathlib import Path

import pytest
from support.jobs import TINY
from support.planned import numbers_of_plans, reading_of_plans
from support.pool import Pool

from pipetransformer.autopipe.profile import AffineTime

RUN = (*TINY, "epochs=2", "freeze=schedule", "freeze.num_frozen=[1]", "freeze.interval=0.5")


@pytest.mark.parametrize(
    "options", [(), ("parallel=sharded",), ("parallel=chunks",), ("parallel.tp=null",)], ids=lambda own: " ".join(own)
)
def test_every_rank_plans_by_the_same_numbers(options: tuple[str, ...], pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(2, numbers_of_plans, (*RUN, *options), tmp_path, False)
    assert first[0] == ""
    assert len(first[1]) > 2, "also when it froze"
    assert others == [first]


def test_nodes_that_store_different_samples_plan_by_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, numbers_of_plans, RUN, tmp_path, True)
    assert first == second
    assert "cache_miss_rate=0.1," in first[1][0]


@pytest.mark.parametrize(("reads_ahead", "in_a_step"), [(False, AffineTime(1.0, 2.0)), (True, AffineTime(0.0, 0.0))])
def test_workers_read_ahead_of_steps_and_of_no_fill(
    reads_ahead: bool, in_a_step: AffineTime, pool: Pool, tmp_path: Path
) -> None:
    options = (*TINY, "epochs=1", "freeze=none")
    assert pool.run(1, reading_of_plans, options, tmp_path, reads_ahead) == [[(in_a_step, 2.0)]]

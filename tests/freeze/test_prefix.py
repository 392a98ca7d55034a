from pathlib import Path

import pytest
from support.jobs import TINY, run_job
from support.pool import Pool

from pipetransformer.freeze.base import Signals
from pipetransformer.freeze.prefix import Prefix


def test_it_is_frozen_from_the_start_and_never_another_block() -> None:
    policy = Prefix(num_blocks=4)
    assert policy.frozen_at_start == 4
    assert policy.is_static
    assert not policy.never_freezes
    decision, state = policy.decide(Signals(0, 6, 4, (0.0,) * 4 + (1.0, 9.0)), {})
    assert (decision.num_frozen, decision.bound, state) == (4, "prefix", {})
    assert decision.reason == "4 of 6 blocks are frozen from the start to the end"


def test_a_frozen_block_stays_frozen() -> None:
    assert Prefix(num_blocks=1).decide(Signals(0, 6, 2, (1.0,) * 6), {})[0].num_frozen == 2


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_prefix_of_no_block_is_an_error(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=rf"freeze\.num_blocks={num_blocks} freezes nothing.*take freeze=none"):
        Prefix(num_blocks=num_blocks)


def test_more_blocks_than_the_model_has_are_an_error_from_the_start() -> None:
    Prefix(num_blocks=6).check(6)
    with pytest.raises(ValueError, match=r"freeze\.num_blocks=7 is more than the 6 blocks of the model"):
        Prefix(num_blocks=7).check(6)


def test_a_run_freezes_it_before_the_first_step_and_decides_nothing_more(pool: Pool, tmp_path: Path) -> None:
    options = (*TINY, "precision=float64", "epochs=2")
    job = run_job(pool, 1, tmp_path / "run", *options, "freeze=prefix", "freeze.num_blocks=2", made_up_times=True)
    assert job.summary["status"] == "completed"
    assert not job.events("decision")
    assert [event["after"]["num_frozen"] for event in job.events("transition")] == [2]
    listed = ("freeze=schedule", "freeze.at_start=2", "freeze.num_frozen=[2]")
    same = run_job(pool, 1, tmp_path / "same", *options, *listed, made_up_times=True)
    assert job.losses == pytest.approx(same.losses, rel=0, abs=1e-10)

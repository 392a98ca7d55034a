"""A policy with a signal of its own is a file each and a row; the runtime knows nothing of it."""

from pathlib import Path

import pytest
from support.jobs import TINY
from support.new_policy import refusal_of_policy, run_with_new_policy
from support.pool import Pool

RUN = (
    *TINY, "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2}", "precision=float64", "optim.eps=1e-6"
)  # fmt: skip


@pytest.mark.thinned("options1")
@pytest.mark.parametrize(
    ("world", "options"), [(2, ()), (2, ("parallel=pipeline", "cache=off")), (2, ("parallel=sharded",))]
)
def test_a_new_policy_with_a_new_signal_decides_alike_in_any_world(
    world: int, options: tuple[str, ...], pool: Pool, tmp_path: Path
) -> None:
    (alone,) = pool.run(1, run_with_new_policy, (*RUN, "parallel=single", "cache=off"), tmp_path / "alone")
    ranks = pool.run(world, run_with_new_policy, (*RUN, *options), tmp_path / "ranks")
    assert [frozen for _, frozen in alone] == [1, 2, 3]
    for found in ranks:
        assert [frozen for _, frozen in found] == [frozen for _, frozen in alone]
        for (own, _), (other, _) in zip(found, alone, strict=True):
            assert own == pytest.approx(other, rel=0, abs=1e-10)


def test_a_policy_that_decides_otherwise_on_each_rank_is_told_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, refusal_of_policy, (*RUN, "parallel=data"), tmp_path)
    assert first == second
    assert first.startswith("at freeze decision 0 ByRank.decide returned num_frozen=0 on rank 0 and 1 on rank 1, for")

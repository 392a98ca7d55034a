"""The benchmark of the cost model runs every plan that it names."""

from collections.abc import Sequence

import pytest
from support.pool import Pool

from experiments.prediction.prediction import PLANS, Times, Wanted, measure, rows
from experiments.step_time.cases import Case

SMALL = Case("small", "vit", 16, {"embed_dim": 16, "depth": 6, "num_heads": 2, "proj_drop_rate": 0.0})


@pytest.mark.thinned("all")
@pytest.mark.parametrize(("plans", "num_rounds"), [(PLANS, 1), (PLANS[:2], 2)], ids=["all", "twice"])
def test_every_plan_is_predicted_and_timed_in_every_round(plans: Sequence[Wanted], num_rounds: int, pool: Pool) -> None:
    times = pool.run(2, measure, SMALL, plans, num_rounds, 1)[0]
    assert [own.plan for own in times] == [wanted.name for wanted in plans]
    assert all(len(own.predicted) == len(own.measured) == num_rounds for own in times)
    assert all(seconds > 0 for own in times for seconds in own.predicted + own.measured)


def test_a_ratio_is_taken_within_its_round() -> None:
    times = Times("a", "b", predicted=(0.1, 0.3, 0.2), measured=(0.1, 0.2, 0.4))
    assert times.ratios == pytest.approx([1.0, 1.5, 0.5])
    assert list(rows([times])) == [("a", "b", "200.0", "200.0", "1.00", "0.75-1.25")]

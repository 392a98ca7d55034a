"""The benchmark of the cost model runs every plan that it names."""

import pytest
from support.pool import Pool

from experiments.prediction.prediction import PLANS, Times, measure, rows
from experiments.step_time.cases import Case

SMALL = Case("small", "vit", 16, {"embed_dim": 16, "depth": 6, "num_heads": 2, "proj_drop_rate": 0.0})


def test_every_plan_is_predicted_and_timed_in_every_round(pool: Pool) -> None:
    times = pool.run(2, measure, SMALL, PLANS, 2, 1)[0]
    assert [own.plan for own in times] == [wanted.name for wanted in PLANS]
    assert all(len(own.predicted) == len(own.measured) == 2 for own in times)
    assert all(seconds > 0 for own in times for seconds in own.predicted + own.measured)


def test_a_ratio_is_taken_within_its_round() -> None:
    times = Times("a", "b", predicted=(0.1, 0.3, 0.2), measured=(0.1, 0.2, 0.4))
    assert times.ratios == pytest.approx([1.0, 1.5, 0.5])
    assert list(rows([times])) == [("a", "b", "200.0", "200.0", "1.00", "0.75-1.25")]

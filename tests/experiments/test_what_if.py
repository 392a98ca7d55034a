import pytest

from experiments.what_if.paper import PAPER, VARIANTS, rows, speedups
from experiments.what_if.scale import HEADER, row
from pipetransformer.config.compose import compose_simulation

COST_MODEL, _, FITTED = VARIANTS.values()


def test_two_assumptions_explain_every_figure_of_the_paper_within_15_percent() -> None:
    found = speedups(compose_simulation(), FITTED)
    assert found == pytest.approx(PAPER, rel=0.15)


def test_the_cost_model_alone_promises_more_than_the_paper_measured() -> None:
    found = speedups(compose_simulation(), COST_MODEL)
    assert all(found[name] > paper for name, paper in PAPER.items() if name != "no freezing")


def test_there_is_a_row_for_each_figure() -> None:
    assert [cells[0] for cells in rows(compose_simulation())] == list(PAPER)


def test_a_row_of_the_scale_table() -> None:
    cells = row("ViT-B/16", num_nodes=1)
    assert len(cells) == len(HEADER)
    assert cells[:3] == ("ViT-B/16", "8", "1 x 8 m2")

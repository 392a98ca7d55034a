import json
from pathlib import Path
from unittest import mock

import pytest
from support.jobs import loaded_simulation

from experiments.record import BEGIN, END
from experiments.what_if import elasticity
from experiments.what_if.elasticity import ARMS, Case, simulate_case
from experiments.what_if.paper import PAPER, VARIANTS, rows, speedups
from experiments.what_if.scale import HEADER, row
from pipetransformer.simulate.run import make_planner, simulate

COST_MODEL, _, FITTED = VARIANTS.values()


def test_two_assumptions_explain_every_figure_of_the_paper_within_15_percent() -> None:
    found = speedups(loaded_simulation(), FITTED)
    assert found == pytest.approx(PAPER, rel=0.15)


def test_the_tables_on_the_papers_cluster_are_those_of_the_readme() -> None:
    readme = (Path(elasticity.__file__).parent / "README.md").read_text("utf-8")
    options = ("cluster=paper", "model=vit", "freeze=pipetransformer", "batch_size=640")
    assert simulate(loaded_simulation(*options)).table() in readme
    assert all(" | ".join(cells) in readme for cells in rows(loaded_simulation()))


def test_the_cost_model_alone_promises_more_than_the_paper_measured() -> None:
    found = speedups(loaded_simulation(), COST_MODEL)
    assert all(found[name] > paper for name, paper in PAPER.items() if name != "no freezing")


def test_there_is_a_row_for_each_figure() -> None:
    assert [cells[0] for cells in rows(loaded_simulation())] == list(PAPER)


def test_a_row_of_the_scale_table() -> None:
    cells = row("ViT-B/16", num_nodes=1)
    assert len(cells) == len(HEADER)
    assert cells[:3] == ("ViT-B/16", "8", "1 x 8 m2")


def test_a_case_compares_the_arms_with_one_static_plan() -> None:
    case = simulate_case("ViT-B/16, ImageNet", "NVLink, InfiniBand", num_nodes=1)
    assert len(case.row()) == len(elasticity.HEADER)
    assert case.num_devices == 8
    assert set(case.speedups) == set(ARMS)
    assert 1 < case.speedups["freeze only"] <= case.speedups["all"] <= case.limit
    assert len(case.paybacks) == len(elasticity.FROZEN)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_begins_with_the_best_static_plan(arm: str) -> None:
    planner = make_planner(loaded_simulation(*elasticity.SETTING, *ARMS[arm]))
    assert planner.initial() == planner.static


MADE_UP = Case("ViT-B/16, ImageNet", "NVLink, InfiniBand", 8, "1 x 8 m1", "1 x 8 m1", dict.fromkeys(ARMS, 2.0), 4.0, [])


@pytest.mark.parametrize(
    ("fraction", "words"),
    [(None, "no gain"), (0.0123, "1.2%"), (1.0, "100.0%"), (7.2, "never")],
)
def test_a_transition_pays_back_within_the_run_or_never(fraction: float | None, words: str) -> None:
    assert elasticity._payback(fraction) == words


def test_a_case_that_is_known_is_not_simulated_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    arguments = [str(tmp_path / "known.json"), "--nodes", "1", "--into", str(tmp_path)]
    with mock.patch.object(elasticity, "simulate_case", return_value=MADE_UP) as simulated:
        elasticity.main(arguments)
        elasticity.main(arguments)
    assert simulated.call_count == len(elasticity.MODELS) * len(elasticity.INTERCONNECTS)
    assert "| 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | 50% | 1.00 |" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == simulated.call_count

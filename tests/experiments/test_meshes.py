"""The experiment about meshes: the order of the published systems, its table of steps, and a run of an arm."""

from pathlib import Path

import pytest
from support.jobs import loaded_simulation

from experiments.meshes import replay
from experiments.meshes.replay import HEADLINES, Headline, ratio
from experiments.meshes.steps import HEADER, Step, rows


@pytest.fixture(autouse=True)
def composes_each_choice_of_groups_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra takes longer than planning."""
    monkeypatch.setattr(replay, "compose_simulation", lambda options: loaded_simulation(*options))


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda headline: headline.system)
def test_the_order_of_the_systems_comes_out(headline: Headline) -> None:
    assert ratio(headline, 64) > 1


def test_rows_of_tensor_parallelism_are_the_better_baseline() -> None:
    over_megatron = {each.mesh: ratio(each, 384) for each in HEADLINES if each.over == "1d, tp 64"}
    assert max(over_megatron, key=over_megatron.__getitem__) == "1d, tp 4 x dp_shard 16"


def test_the_tables_of_the_replay_are_those_of_the_readme() -> None:
    readme = (Path(replay.__file__).parent / "README.md").read_text("utf-8")
    assert replay.tables() in readme


def test_ratios_of_steps_are_taken_within_a_seed() -> None:
    steps = [
        Step("digits", arm, seed, mesh, 0.1, measured_s)
        for arm, mesh, times in (("without", "", (0.2, 0.4)), ("open", "tp 2", (0.1, 0.1)))
        for seed, measured_s in enumerate(times)
    ]
    without, own = rows(steps)
    assert len(own) == len(HEADER)
    assert without == ("digits", "without", "none", "100 ms", "300 ms", "3.00", "1.00 (1.00-1.00)")
    assert own == ("digits", "open", "tp 2", "100 ms", "100 ms", "1.00", "3.00 (2.00-4.00)")

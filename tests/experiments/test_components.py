"""Every experiment file stays valid, and the ablation's sweep and table work in a tiny form."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.command import train
from support.jobs import TINY, loaded

from experiments.components.table import ARMS, KEEPING, main
from experiments.record import BEGIN, END
from pipetransformer.config.compose import CONF
from pipetransformer.config.no_effect import warnings
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Cache

EXPERIMENTS = CONF / "experiment"
NAMES = sorted(str(file.relative_to(EXPERIMENTS).with_suffix("")) for file in EXPERIMENTS.rglob("*.yaml"))
SWITCHES = {  # (freezes, parallel.autopipe, parallel.autodp, cache.enabled)
    "freeze": (True, False, False, False),
    "autopipe": (True, True, False, False),
    "autopipe_autocache": (True, True, False, True),
    "autopipe_autodp": (True, True, True, False),
    "all": (True, True, True, True),
}


def arm(name: str) -> Config:
    return loaded(f"experiment=components/{name}")


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_composes_without_a_setting_that_has_no_effect(name: str) -> None:
    assert warnings(loaded(f"experiment={name}")) == []


def test_each_arm_of_the_table_has_its_file() -> None:
    assert {f"components/{name}" for name in ARMS} == {name for name in NAMES if name.startswith("components/")}


@pytest.mark.parametrize("name", SWITCHES)
def test_arms_differ_from_all_by_their_switches_alone(name: str) -> None:
    config, everything = arm(name), arm("all")
    parallel = config.parallel
    found = (not config.freeze.never_freezes, parallel.autopipe, parallel.autodp, config.cache.enabled)
    assert found == SWITCHES[name]
    assert replace(config, parallel=replace(parallel, autopipe=True, autodp=True), cache=Cache()) == everything


def test_the_baselines_differ_from_all_by_the_policy_and_the_control_by_its_length() -> None:
    baseline, shorter, everything = arm("baseline"), arm("shorter"), arm("all")
    assert baseline.freeze.never_freezes
    assert replace(baseline, freeze=everything.freeze) == everything
    assert shorter.epochs < baseline.epochs
    assert replace(shorter, epochs=baseline.epochs) == baseline


# in every run: the arms compose (above), tests/test_sweep.py sweeps, and test_table.py reads a sweep
@pytest.mark.thorough
def test_the_sweep_of_the_readme_in_a_tiny_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = "experiment=components/baseline,components/all"
    fewer = ("parallel.world_size=2", "parallel.device_memory_gib=null", "hydra.sweep.dir=sweep", KEEPING)
    ended = train(tmp_path, "-m", arms, *TINY, *fewer)
    assert ended.code == 0, ended.err
    assert "has no effect" not in ended.out
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    main([str(tmp_path / "sweep"), "--into", str(tmp_path)])
    table = capsys.readouterr().out.strip()
    assert [row.split(" | ")[0] for row in table.splitlines()[2:]] == ["| no freezing", "| all"]
    assert table in (tmp_path / "README.md").read_text()

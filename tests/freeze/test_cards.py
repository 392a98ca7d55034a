"""Each policy has a card, the table of all lists it, and both name its options as they are."""

import re
from pathlib import Path

import pytest
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from support.jobs import ROOT

from pipetransformer.config.compose import CONF
from pipetransformer.freeze.base import FreezePolicy

FILES = sorted((CONF / "freeze").glob("*.yaml"))
CARDS = ROOT / "docs" / "methods"
COMMON = set(FreezePolicy.__dataclass_fields__)


def options(file: Path) -> DictConfig:
    node = OmegaConf.load(file)
    assert isinstance(node, DictConfig)
    return node


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_card_explains_every_knob_of_its_policy(file: Path) -> None:
    card = (CARDS / f"{file.stem}.md").read_text()
    assert card.startswith(f"# `freeze={file.stem}`\n")
    for part in ("What it does", "Formula", "Cost of measuring", "When it fails", "Source"):
        assert f"**{part}.**" in card, part
    missing = [str(knob) for knob in options(file) if knob not in COMMON | {"_target_"} and f"`{knob}`" not in card]
    assert not missing


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_table_of_policies_has_its_card_and_its_signals(file: Path) -> None:
    (row,) = [line for line in (CARDS / "README.md").read_text().splitlines() if f"]({file.stem}.md) |" in line]
    node = options(file)
    needs = [key for key in node if not key.startswith("_") and OmegaConf.is_missing(node, str(key))]
    given = {"num_frozen": [1], "num_blocks": 1}
    policy = get_class(node["_target_"])(**{key: given[str(key)] for key in needs})
    assert set(policy.signals) <= set(re.findall(r"`(\w+)`", row.split("|")[3]))
    assert f"`{file.stem}`" in (ROOT / "README.md").read_text()

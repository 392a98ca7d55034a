"""What every policy promises; a new policy is a YAML file and is found here by itself."""

import json
from pathlib import Path
from typing import cast

import pytest
from hydra.utils import get_class, instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from pipetransformer.config.compose import CONF
from pipetransformer.freeze.base import FreezePolicy, Signals

FILES = sorted((CONF / "freeze").glob("*.yaml"))
NUM_BLOCKS = 6
GIVEN = {"schedule": {"num_frozen": [2, 4]}}


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request: pytest.FixtureRequest) -> Path:
    return request.param


def load(file: Path) -> DictConfig:
    """The options of a policy, with those given that its file leaves to the user."""
    node = OmegaConf.load(file)
    assert isinstance(node, DictConfig)
    return cast("DictConfig", OmegaConf.merge(node, GIVEN.get(file.stem, {})))


def policy_of(file: Path) -> FreezePolicy:
    return instantiate(load(file), _convert_="all")


def test_the_file_names_every_field_of_its_policy_and_no_other(file: Path) -> None:
    node = load(file)
    schema = OmegaConf.structured(get_class(node["_target_"]))
    assert {key for key in node if key != "_target_"} == set(schema)
    OmegaConf.merge(schema, {key: node[key] for key in schema})


def test_every_key_is_explained(file: Path) -> None:
    assert all("#" in line for line in file.read_text().splitlines() if not line.startswith("_target_"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@settings(deadline=None)
@given(steps=st.lists(st.lists(st.floats(0, 10), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS), max_size=8))
def test_the_prefix_grows_within_the_model_and_equal_signals_give_equal_decisions(
    path: Path, steps: list[list[float]]
) -> None:
    policy = policy_of(path)
    num_frozen, state = 0, policy.initial_state()
    for count, norms in enumerate(steps):
        measured = Signals(count, NUM_BLOCKS, num_frozen, tuple(norms))
        decision, new_state = policy.decide(measured, state)
        assert (decision, new_state) == policy.decide(measured, json.loads(json.dumps(state)))
        assert num_frozen <= decision.num_frozen <= NUM_BLOCKS
        assert decision.bound
        assert decision.reason
        num_frozen, state = decision.num_frozen, new_state
    assert not (policy.never_freezes and num_frozen)
